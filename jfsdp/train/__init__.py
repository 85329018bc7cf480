"""How a state is made, stepped and fed."""
