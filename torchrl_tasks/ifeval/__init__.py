"""IFEval, instructions that a program can verify."""
