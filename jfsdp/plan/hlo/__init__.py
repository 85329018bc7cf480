"""Read a compiled program: instructions, execution counts, dataflow, collectives."""
