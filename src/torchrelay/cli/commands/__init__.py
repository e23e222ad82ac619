"""The commands of `torchrelay`, by what they work on."""
