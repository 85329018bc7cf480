"""A step as a pipeline: stages of layers over mesh axis `pipe`, by a schedule of ints."""
