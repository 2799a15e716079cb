"""Neural network layers, each a Module."""

from .._public import publish as _publish
from .._tree import tree_inference as _tree_inference
from ._adaptive_pool import (
    AdaptiveAvgPool1d as AdaptiveAvgPool1d,
    AdaptiveAvgPool2d as AdaptiveAvgPool2d,
    AdaptiveAvgPool3d as AdaptiveAvgPool3d,
    AdaptiveMaxPool1d as AdaptiveMaxPool1d,
    AdaptiveMaxPool2d as AdaptiveMaxPool2d,
    AdaptiveMaxPool3d as AdaptiveMaxPool3d,
    AdaptivePool as AdaptivePool,
)
from ._attention import MultiheadAttention as MultiheadAttention
from ._batch_norm import BatchNorm as BatchNorm
from ._conv import (
    Conv as Conv,
    Conv1d as Conv1d,
    Conv2d as Conv2d,
    Conv3d as Conv3d,
)
from ._conv_transpose import (
    ConvTranspose as ConvTranspose,
    ConvTranspose1d as ConvTranspose1d,
    ConvTranspose2d as ConvTranspose2d,
    ConvTranspose3d as ConvTranspose3d,
)
from ._dot_product_attention import dot_product_attention as dot_product_attention
from ._dropout import Dropout as Dropout
from ._einsum import Einsum as Einsum
from ._ema import EMA as EMA
from ._embedding import Embedding as Embedding
from ._generate import Generation as Generation, generate as generate
from ._group_norm import GroupNorm as GroupNorm, InstanceNorm as InstanceNorm
from ._kv_cache import KVCache as KVCache
from ._linear import Identity as Identity, Linear as Linear
from ._lora import LoRA as LoRA, add_lora as add_lora, merge_lora as merge_lora
from ._loss_scale import (
    DynamicLossScale as DynamicLossScale,
    NoLossScale as NoLossScale,
    StaticLossScale as StaticLossScale,
    all_finite as all_finite,
    select_tree as select_tree,
)
from ._masks import (
    causal_mask as causal_mask,
    combine_masks as combine_masks,
    padding_mask as padding_mask,
)
from ._mlp import MLP as MLP
from ._norm import (
    LayerNorm as LayerNorm,
    RMSNorm as RMSNorm,
)
from ._policy import (
    Mixed as Mixed,
    Policy as Policy,
    mixed as mixed,
    precision as precision,
)
from ._pool import (
    AvgPool1d as AvgPool1d,
    AvgPool2d as AvgPool2d,
    AvgPool3d as AvgPool3d,
    MaxPool1d as MaxPool1d,
    MaxPool2d as MaxPool2d,
    MaxPool3d as MaxPool3d,
    Pool as Pool,
)
from ._position import (
    LearnedPositionalEmbedding as LearnedPositionalEmbedding,
    SinusoidalPositionalEmbedding as SinusoidalPositionalEmbedding,
)
from ._precision import cast_to_precision as cast_to_precision, in_float32 as in_float32
from ._prelu import PReLU as PReLU
from ._recurrent import RNN as RNN, Bidirectional as Bidirectional
from ._reinit import reinit as reinit
from ._reparam import SpectralNorm as SpectralNorm, WeightNorm as WeightNorm
from ._resize import Upsample as Upsample, resize as resize
from ._reversible import (
    ReversibleBlock as ReversibleBlock,
    ReversibleSequential as ReversibleSequential,
)
from ._rnn import GRUCell as GRUCell, LSTMCell as LSTMCell
from ._rope import RotaryPositionalEmbedding as RotaryPositionalEmbedding
from ._sampling import sample_logits as sample_logits
from ._scan_cell import scan_cell as scan_cell
from ._sequential import Lambda as Lambda, Sequential as Sequential
from ._shared import Shared as Shared
from ._stacked import Stacked as Stacked
from ._state import (
    State as State,
    StateIndex as StateIndex,
    delete_init_state as delete_init_state,
    make_with_state as make_with_state,
)
from ._stateful import StatefulLayer as StatefulLayer
from ._summary import Summary as Summary, SummaryRow as SummaryRow, summary as summary

_publish(globals(), __name__)

inference_mode = _tree_inference
"""A copy of a model in which dropout is off and `BatchNorm` uses its running statistics.

```py
inference_mode(pytree: Tree, value: Any = True, *, where: Any = None) -> Tree
```

It sets each field named `inference`, at any depth, and is the function
[`equinox_like.tree_inference`][] by another name.

**Arguments:**

- `pytree`: the model.
- `value`: what to set. `False` switches back to training.
- `where`: a part of the model, as in [`equinox_like.tree_at`][]; by default the whole.

!!! example

    ```python
    import equinox_like as eqx
    import jax

    model = eqx.nn.Sequential([eqx.nn.Dropout(0.5), eqx.nn.Identity()])
    assert eqx.nn.inference_mode(model)[0].inference
    ```
"""
