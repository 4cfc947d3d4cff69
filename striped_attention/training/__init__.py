"""`striped train`: train a causal language model on sequences longer than one device can hold.

config      every option, once: flags, help, defaults and the record kept with a run
data        text in, batches out
step        one step: loss, gradients, optimiser, over the whole mesh
checkpoint  save and restore
trainer     the loop around it: progress, metrics, signals
launch      one process or many
dry_run     what a run would need, without running it
"""
