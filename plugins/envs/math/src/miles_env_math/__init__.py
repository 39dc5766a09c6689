"""Miles environment `math`: problems from a file, answers checked by math-verify."""
