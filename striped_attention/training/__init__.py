"""`striped train`: train a causal language model on sequences longer than one device can hold.

config      every option, once: flags, help, defaults and the record kept with a run
step        one step: loss, gradients, optimiser, over the whole mesh
checkpoint  save and restore
storage     Orbax, which does the writing and reading
folder      what a run's folder holds besides: its record and its tokenizer
trainer     the loop around it: progress, metrics, signals
validation  the loss on held-out data while a run goes on
loss_by_position    the program that takes it, by how much of its document a token sees
watch       what is shown and kept of every step
events      the files that TensorBoard reads
launch      one process or many
dry_run     what a run would need, without running it
"""
