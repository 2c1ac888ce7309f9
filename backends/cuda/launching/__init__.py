"""Launches, whichever family's: arrays, arguments and tensor maps, to the driver of a GPU or to the emulator."""
