"""Makes `tests/data/resnet.safetensors`, which `tests/test_resnet.py` reads, and prints how
far the model of `examples/resnet` is from that of torchvision, for the page.

It is run by hand, and only to change them:

    pip install torch torchvision safetensors
    python tests/data/make_resnet.py

The weights are random, and would be 45 MB. So the file has only the names and shapes of
torchvision's state dict, and outputs for weights that `random_weights` makes of them, here
and in the test.
"""

import json
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parents[1] / "examples" / "resnet"))


def random_weights(shapes):
    """Arrays for a state dict. No array keeps the values of a new model, such as 0 or 1.

    `RandomState` gives the same numbers with every version of NumPy.
    """
    random = np.random.RandomState(0)
    arrays = {}
    for name, shape in shapes.items():
        x = random.standard_normal(shape).astype("f4")
        if name.endswith("num_batches_tracked"):
            x = np.array(100)
        elif name.endswith("running_var") or (len(shape) == 1 and "weight" in name):
            x = np.exp(x / 5)
        elif len(shape) == 1:
            x = x / 5
        else:
            x = x * np.float32(np.sqrt(2 / np.prod(shape[1:])))
        arrays[name] = x
    return arrays


def random_images(number, size):
    return (
        np.random.RandomState(1).standard_normal((number, 3, size, size)).astype("f4")
    )


def main():
    import jax
    import resnet
    import torch
    import torchvision
    from safetensors.numpy import save_file

    import equinox_like as eqx

    theirs = torchvision.models.resnet18()
    shapes = {name: list(x.shape) for name, x in theirs.state_dict().items()}
    weights = random_weights(shapes)
    theirs.load_state_dict({name: torch.tensor(x) for name, x in weights.items()})
    images = random_images(4, 64)

    def theirs_of(images):
        with torch.no_grad():
            return theirs(torch.tensor(images)).numpy()

    theirs.eval()
    expected = {"evaluated": theirs_of(images)}
    large = random_images(2, 224)
    evaluated_large = theirs_of(large)
    theirs.train()
    expected["trained"] = theirs_of(images)
    after = {name: x.numpy() for name, x in theirs.state_dict().items()}
    expected |= {
        name: after[name] for name in ("bn1.running_mean", "layer4.1.bn2.running_var")
    }
    save_file(expected, FOLDER / "resnet.safetensors", {"shapes": json.dumps(shapes)})

    model, state = resnet.load(weights)
    axes = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "batch"}
    evaluate = jax.jit(
        lambda images: jax.vmap(eqx.nn.inference_mode(model), **axes)(images, state)[0]
    )
    train = jax.jit(lambda images: jax.vmap(model, **axes)(images, state))
    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}")

    def compare(what, ours, theirs):
        print(
            f"{what}: differ by at most {np.abs(ours - theirs).max():.1e}; "
            f"the largest is {np.abs(theirs).max():.1f}"
        )

    compare("logits at 64 x 64", evaluate(images), expected["evaluated"])
    compare("logits at 224 x 224", evaluate(large), evaluated_large)
    logits, state = train(images)
    compare("logits in training", logits, expected["trained"])
    for kind, i in ("running_mean", 0), ("running_var", 1):
        ours, wanted = [], []
        for path, layer in eqx.select(model).of(eqx.nn.BatchNorm):
            name = resnet.rename(path.replace("[", ".").replace("]", ""))
            ours.append(state.get(layer.batch_state_index)[i])
            wanted.append(after[f"{name}.{kind}"])
        compare(f"{kind} after a step", np.concatenate(ours), np.concatenate(wanted))


if __name__ == "__main__":
    main()
