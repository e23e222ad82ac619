"""What a state at rest or on offer holds: its tensors, their statistics, how two of them differ.

Nothing here needs a process group or a GPU, and no tensor is read whole.
"""
