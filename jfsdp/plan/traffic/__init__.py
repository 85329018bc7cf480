"""Compare a program's communication with its layout: theory, ledger, audit."""
