"""Whether a bundle is still the model that it was made from: perplexity on held-out text, and the tokens it generates.

Each model runs in a process of its own, which `edge_opt.build` starts; this room holds what is done there, and the
arithmetic of what comes back.
"""
