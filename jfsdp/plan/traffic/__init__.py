"""What a program moves beside what its layout must move: theory, ledger, audit."""
