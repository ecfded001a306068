// An empty library in libtorch.so's name, so that linking needs no torch.
