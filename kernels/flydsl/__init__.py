"""The ragged MXFP8 weight gradient for gfx950 in FlyDSL: device code, its machine code without a GPU, its launches."""
