"""The instructions of `nki.isa`, one file each; `simulate.isa` finds every file of this folder by itself."""
