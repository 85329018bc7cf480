"""The peak of a program in parts."""
