"""What is to be said of single panels on the page: where a finding does not hold, and why."""

from __future__ import annotations

REMARKS: dict[str, str] = {
    "fig2a": (
        "The ranks agree, the sizes of the paper's rule do not: it moves predictions along a "
        "straight line and each output by its own variance alone. On the few memorised images, "
        "whose prediction turns round without them, that gives a fifth of the change; engram's own "
        "rule has it. Few images are left out here, and three of them have nearly all deviation."
    ),
    "fig2b": (
        "A dozen images, trained again in batches of 16. The mean size of the paper's rule is "
        "right by one image alone, at 1.7 for 0.3; the two others that are sensitive are at a "
        "quarter. Engram's rule has the three of them right. The ranks are mostly those of small "
        "changes."
    ),
    "fig2c": (
        "Eight images, and nets that were trained again for one epoch with nothing left out differ "
        "by 0.13 in the mean, as much as the most sensitive images: hardly anything can be said "
        "from it. "
        "The net has learned 88 % of its images, the paper's 99.9 %; the estimates, which are of a "
        "minimum, are about five times as large as what an epoch changes."
    ),
    "fig1b": (
        "A fifth of the paper's images and an eighth of its epochs, at its own rate: the net ends "
        "six points below the margin from which it is judged. The estimate is nearer to the test "
        "loss than the training loss is at every look, and a quarter too low at the end; that with "
        "the training time is far too large, why was not found. The paper's 200 epochs of 50,000 "
        "images take about eight hours at 3 ms an image."
    ),
    "fig8-cifar-cnn-a": (
        "A fifth of the paper's images; the net ends two points below the margin from which it is "
        "judged by. What it finds is the paper's: from the fifth epoch on the estimate is "
        "nearer to the test loss than the training loss is."
    ),
    "fig6b": (
        "The paper trains again with rates of 1e-4 to 1e-5 here, a sixth of the sum of figure 2's: "
        "such nets have not come to the minimum without the group, and the estimates, which are of "
        "that minimum, are more than twice as large. The order of the groups is there."
    ),
    "fig3a": (
        "As in the paper Shirt, Coat and Pullover are among the most sensitive, Trouser and Bag "
        "among the least. Sneaker and Ankle boot are off the line: without one of them the other "
        "takes its images. Training again ends long before the minimum at the paper's rates "
        "(down to 1e-6), so that the test losses of the estimate with all cross terms, which are "
        "of the minimum, are several times as large."
    ),
    "fig5c": (
        "The order of the three estimates is the paper's. On a sixth of its images the estimate "
        "is far too large in the middle of training and within a few per cent at its end."
    ),
    "fig8-mnist-lenet5-a": (
        "The net hardly overfits, and its training loss is as near to the test loss as any "
        "estimate: this panel cannot tell much at a sixth of the images."
    ),
    **dict.fromkeys(
        ("fig10-cifar-cnn-8", "fig10-cifar-cnn-32"),
        "A fifth of the paper's images, and four epochs (the paper: 50): the net is far from its "
        "accuracy. The paper's comparison holds all the same: the smaller batches are nearer.",
    ),
    "fig8-cifar-cnn-b": (
        "A fifth of the paper's images, ten epochs at a third of its rate in batches of 64. The "
        "net is far from a minimum throughout, and the posteriors are those of one."
    ),
    "fig8-cifar-cnn-c": (
        "The order is the paper's, the distance is larger: as on LeNet5, K-FAC alone takes the net "
        "for one that has come to its minimum."
    ),
    "fig11d": (
        "LeNet5 has a training loss of 0.02 here. At so small a loss there is hardly any curvature "
        "at the end, a class's step is held by the prior alone, and outputs go along their tangent "
        "as far as it leads. With the recorded time of its training the estimate is of the size of "
        "the truth. The paper's rates end training again long before the class is forgotten."
    ),
    "fig8-mnist-lenet5-c": (
        "The order is the paper's, the distance is larger: K-FAC alone takes the net for one that "
        "has come to its minimum. With the training time it is near."
    ),
    **dict.fromkeys(
        ("fig9a", "fig9b"),
        "On half of the paper's images the net has its accuracy. The test loss is least at epoch "
        "10; the residuals become smaller all the time, and with them every estimate of a step "
        "from there. K-FAC falls throughout: it deteriorates where the net overfits, as the "
        "paper says, and is no use to stop here. The diagonal one rises a little, from 0.78 at "
        "epoch 5 to 0.84 at epoch 20, and falls again. With the training time the estimate is "
        "least at epoch 5, before the test loss is, and too large from there on.",
    ),
    "fig4a": (
        "From delta 10 on the estimate is within 20 % of the test loss and has its least where "
        "the test loss has. At delta 1 it is four times the test loss: the net is not at its "
        "minimum after 9,420 steps (the paper: 117,000), and a posterior that takes it for one "
        "is too wide. The estimate with the training time is near from delta 100 on and has "
        "hardly anything left of the loss where the images are known by heart."
    ),
    "fig11c": (
        "A ResNet-20 of 3,000 images and eight epochs has hardly begun. The share of the most "
        "sensitive examples grows as the paper finds it does."
    ),
    "fig4b": (
        "For delta of 215 and 1,000 the estimate is 11 and 2 % above the test loss. For less the "
        "net is far from its minimum after 4,000 steps (the paper: 70,000), and a posterior that "
        "takes it for one is too wide, the more so the fewer images there are. The estimate with "
        "the training time is nearer there, and too flat to choose by. Four values of delta say "
        "little about ranks."
    ),
    "fig4c": (
        "A fiftieth of the paper's images and 630 steps of AdamW, whose decay of delta / N has "
        "hardly any effect in so few: the test loss is 2 at every delta, and there is no curve to "
        "follow. The net is at a training loss of 0.45, far from its minimum, and the variance, "
        "which goes with 1 / N, is fifty times the paper's. With the training time the estimate is "
        "too large as well."
    ),
    **dict.fromkeys(
        ("fig10-mnist-mlp-8", "fig10-mnist-mlp-32"),
        "The first criterion of these panels asked each for an estimate at least 15 % off, which "
        "the paper does not say, and the one of batches of 8 did not meet. The paper says that "
        "such measures may not always work and that smaller batches are generally nearer.",
    ),
}
