"""What route `cuda_ipc` is made of: handles of device memory, digests made by devices."""
