"""The commands of `mxgate`, a file each: options(parser) and command(args) -> exit code."""
