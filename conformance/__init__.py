"""Cases, gates and the runner that holds a build against the oracle."""
