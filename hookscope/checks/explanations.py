"""Why each rule objects: what causes it, what it does not mean, and what to do; for `hookscope check --explain`."""

from collections.abc import Mapping

EXPLANATIONS: Mapping[str, str] = {
    "integrity": "The file is read to its end without running anything in it: truncated downloads, damaged archives,"
    " unknown formats and files that would run code when unpickled are refused. Nothing else can be checked then, so"
    " the check fails whatever the level. Download or save the file again; for a file of your own that needs unpickling"
    " give --trust.",
    "architecture": "Every name and shape of the network must be in the file, and nothing else. Half a checkpoint, one"
    " saved from another version of the code, or weights of another network break it. Nothing else can be checked then,"
    " so the check fails whatever the level. Name the network with --arch, or what may differ with allow_missing and"
    " allow_unexpected.",
    "non-finite-parameter": "One NaN in a weight makes every output NaN. It comes of a step with too large a learning"
    " rate, an overflow in half precision, or a damaged file. A buffer that holds nothing but zeros and infinities is a"
    " mask, and passes. Go back to an earlier checkpoint.",
    "zero-parameter": "A weight with at least two axes longer than 1 that is zero passes nothing on. It was never"
    " loaded, was pruned, or starts so by design: untrained heads and the last layer of residual branches do. Biases"
    " and scales are left alone.",
    "constant-parameter": "A weight with at least two axes longer than 1 and a single value makes all its outputs the"
    " same. It was allocated, but never initialised or loaded. Biases and scales are left alone.",
    "duplicate-parameter": "Two weights of equal values that do not share memory are mostly a slip: one was loaded"
    " twice, or layers were copied and never trained apart. Tied weights and constant ones do not count.",
    "batchnorm-variance": "A running variance is a mean of squares: negative, it is damaged, and the root of it NaN."
    " Zero in a few channels is what dead ones come to; in many, the buffer was zeroed instead of loaded, and eval mode"
    " divides by the root of eps, which multiplies every deviation. A single one is enough where the channel is not"
    " dead, for its running mean is not zero, and while all running means are zero, for no training has brought a"
    " variance to zero then.",
    "dead-filter": "A row or kernel of zeros gives an output channel that is constant. Structured pruning does it on"
    " purpose; so does weight decay on a channel that gets no gradient. A weight that is zero as a whole is left to"
    " zero-parameter, and rows of embeddings are no filters: that of the padding is zero by design.",
    "forward": "The network cannot run on what it is given. The message names the innermost module that was running and"
    " the shapes it was given. If the input does not fit, say what it takes: shape, resize, crop or images. What the"
    " forward pass would have shown is skipped.",
    "non-finite-activation": "The first module in execution order that turns finite inputs into NaN or Inf is named,"
    " with its own parameters that are not finite; those that only pass it on are counted. Overflow, a division by"
    " zero, a root or logarithm of what is negative do it. -Inf in an attention mask is no finding as long as nothing"
    " comes of it. The rules that it would break by itself are skipped.",
    "output-shape": "The shape or dtype of the output is not what shape or dtype below [output] ask for, or the output"
    " has another number of classes than there are names. With neither asked for nor names known, any output passes.",
    "constant-output": "Different inputs come to the same output: the signal dies on the way, and biases are all that"
    " is left. A zero weight, a dead layer, or a head that was never loaded do it. It is a warning where it is a matter"
    " of training: while the last weights are all zero, all statistics of BatchNorm are as they start, or hookscope"
    " itself drew the weights at random. Needs two different inputs.",
    "repeatability": "Something draws random numbers in eval mode, or keeps state from one pass to the next: functional"
    " dropout without `training=self.training`, noise, a cache.",
    "batch-consistency": "Inputs of one batch influence each other: BatchNorm with batch statistics in eval mode"
    " (track_running_stats=False), normalisation over the wrong axis, a reshape that mixes axis 0. Scores then depend"
    " on what else is in the batch.",
    "dead-channels": "A channel behind a ReLU that is zero at every position of every input learns nothing and says"
    " nothing. Too large a learning rate or too negative a bias does it. Judged are modules of the kinds ReLU, ReLU6,"
    " Hardswish and Threshold with at least 32 values a channel; a convolution before a ReLU may be as negative as it"
    " likes. Channels that are zero for two noise images may wake up for a picture: give real ones.",
    "quiet-channels": "GELU, SiLU and their like are never exactly zero, but far below zero they are nearly so, and so"
    " is their slope. A channel is quiet if it stays that near to zero at every position of every input, while others"
    " of the layer do not; a layer that is small as a whole works in the linear part around zero, where nothing is"
    " closed, unless all of it is negative. At least 32 values a channel.",
    "saturated-activation": "Behind a sigmoid or tanh at its bounds the gradient is nearly gone, and the output says"
    " yes or no to everything. Weights are too large, or the input is not normalised. Gates that are open or closed on"
    " purpose look the same.",
    "fp16-headroom": "Greater values than 65504 become Inf in float16, and weights of at most 2**-25 become zero."
    " Judged are all activations and weights as they are, on the inputs given: mixed precision, where sums are kept in"
    " float32, may do better. Of no consequence if float16 is never used.",
    "bf16-headroom": "bfloat16 has the range of float32, so this only breaks shortly before float32 does, but earlier"
    " than Inf. The precision of bfloat16, 8 bits, is not judged.",
    "expectation": "A picture whose content is known must be classified so: top1, the classes that the first k must"
    " contain, min_probability. Nothing else tells shuffled classes, wrong preprocessing or a half-trained network from"
    " a good one. It is off until the configuration names expectations.",
    "drift": "The same inputs gave other statistics when the baseline was written. The first layer in execution order"
    " that drifts is where to look: weights, preprocessing, or a library changed. If the change was meant, renew the"
    " baseline with --update-baseline. It is off until a baseline is given.",
    "non-finite-loss": "The loss of the check is NaN or Inf. Mostly the forward pass is already not finite; else the"
    " loss takes the logarithm of zero, or overflows.",
    "non-finite-gradient": "A backward that divides by zero, as of a root at 0 or a norm of zeros, makes NaN out of a"
    " finite gradient. The layer that makes it is named, those that pass it on are not. Needs a finite loss.",
    "zero-gradient": "Nothing can learn: the loss does not depend on any parameter, or is constant by construction, as"
    " the sum of a softmax or of what LayerNorm gives out is. Choose another loss, then look at the layers.",
    "dead-gradient": "A layer between the loss and the input gets a gradient of exactly zero: a dead ReLU, a detached"
    " branch, an underflow. It is a warning where a weight that starts at zero blocks the path until its first update,"
    " where stochastic depth has left out a branch for all inputs, by chance, or where the loss gives an output none,"
    " but others some. A module that gets a gradient at another call or output is well, and so is one beside which a"
    " parallel one gets one: levels of a detector without an object, experts without a token.",
    "vanishing-gradient": "‖g‖/‖w‖, what a step changes relative to what is there, is far smaller for the first weights"
    " than for the last: saturated activations, missing normalisation or skip connections, too small an"
    " initialisation.",
    "exploding-gradient": "‖grad_output‖ grows from the last layers to the first: too large an initialisation, or"
    " recurrence without clipping. Untrained BatchNorm in eval mode does not normalise, so then it is a warning.",
    "unused-parameter": "Trainable parameters that the loss does not reach are dead weight, and DistributedDataParallel"
    " waits for them forever. Heads that are only used in training look so in eval mode.",
    "gradient-imbalance": "The optimiser has one learning rate; where ‖g‖/‖w‖ of weights differ by orders of magnitude,"
    " some blow up before others move. Adaptive optimisers even it out. Biases, scales and zero weights do not count,"
    " and a vanishing gradient is not said twice.",
}
"""By identifier of the rule."""
