"""Durable state: `Checkpointer` beside torch's DCP, safetensors and `torch.save`.

One process with a Llama-like model and its AdamW state, then two ranks that hold it sharded. All
laps of a row are run in turn: what is saved is removed again, and the disk's queue is empty, before
the next begins. Stock tools have processes of their own, since how one treats its memory would
change what the other finds. The first lap of each kind is not counted: after it, what was loaded is
compared with what was saved, bit for bit. Digests are on for ours; all make their files durable.
"""
