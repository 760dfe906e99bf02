"""A small FlyDSL kernel whose compiled text, right and with seeded synchronisation faults, tests the emulator."""
