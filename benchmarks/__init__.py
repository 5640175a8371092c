"""Speed and memory of signal-batch beside what one would otherwise write, measured in one run.

`python -m benchmarks` writes synthetic datasets once, checks that every contender computes the
same values, and measures the contenders in turn (A B C A B C ...), each measurement in a process
of its own. What counts are ratios between contenders of the same round and their medians: the
rates themselves say as much about the machine and whatever else runs on it.

How a figure comes about:

records/s  Steady state. A process imports, opens the dataset, handles a few records as a warm-up
           with nothing left in flight, and reports ready. When all processes of a contender are
           ready the clock starts; it stops when the last of them is done: every batch taken or,
           for an export, every file complete. So imports and opening are left out, and the start
           and the end of the pipeline are not. For `signal_batch` the warm-up of an export is the
           first part of each worker, the processes run `signal_batch.worker.work` on the work
           orders that `signal_batch.planning` made, and hashing, fsync and receipts count.
whole s    From starting the command to its end, imports and warm-up included; for `signal_batch`
           that of `python -m signal_batch export`: planning, workers, commit.
us CPU     Time on all cores for a record, in steady state, and its ratio: where other programs
           compete for the cores, or two processes for one, this is what stays comparable.
peak MB    Largest resident set of the largest process of the contender, over its whole life.

Datasets are read from the page cache: they are small, and have just been checked. All contenders
run in the environment of an export's workers: one thread for each numerical library, and an
allocator that keeps freed memory.
"""
