"""`striped train`: train a causal language model on sequences longer than one device can hold.

config      all options in one place: flags, help, defaults and the record kept with a run
start       the initial state of a run: fresh weights, an existing model or the run's own checkpoints
step        one training step on the whole mesh: loss, gradients, optimiser
checkpoint  save and restore
storage     reading and writing through Orbax
folder      the other files in a run's folder: its record and its tokenizer
trainer     a run from its options to its end
loop        the training loop: batches, metrics, validation, checkpoints, signals
validation  the loss on held-out data during a run
loss_by_position    the program that computes this loss, by how many tokens of its document a token can see
watch       live display and logs of every step
events      TensorBoard's event files
launch      start one process or several
output      standard output without the messages of libraries
dry_run     estimate what a run needs, without running it
"""
