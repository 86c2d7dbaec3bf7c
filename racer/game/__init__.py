"""What a car drives on: the rules, the tracks, the embedded engine, the bridge to the real game. NumPy only, but for the bridge."""
