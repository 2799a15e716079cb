"""Neural network layers, each a Module."""

import typing as _t

from .._public import (
    describe_arguments as _describe_arguments,
    missing as _missing,
    publish as _publish,
)
from .._tree import tree_inference as _tree_inference
from ._adapt.ema import EMA as EMA
from ._adapt.lora import (
    LoRA as LoRA,
    add_lora as add_lora,
    choose_lora as choose_lora,
    drop_lora as drop_lora,
    load_lora as load_lora,
    merge_lora as merge_lora,
    save_lora as save_lora,
)
from ._adapt.parameters import reinit as reinit
from ._adapt.quantised import Quantized as Quantized, quantize as quantize
from ._adapt.reparam import (
    Shared as Shared,
    SpectralNorm as SpectralNorm,
    WeightNorm as WeightNorm,
)
from ._adapt.summary import Summary as Summary, summary as summary
from ._attention.attention import MultiheadAttention as MultiheadAttention
from ._attention.dot_product import dot_product_attention as dot_product_attention
from ._attention.kv_cache import KVCache as KVCache
from ._attention.masks import (
    causal_mask as causal_mask,
    combine_masks as combine_masks,
    padding_mask as padding_mask,
)
from ._base.precision import (
    cast_to_precision as cast_to_precision,
    in_float32 as in_float32,
)
from ._base.state import (
    State as State,
    StatefulLayer as StatefulLayer,
    StateIndex as StateIndex,
    delete_init_state as delete_init_state,
    make_with_state as make_with_state,
)
from ._layers.batch_norm import BatchNorm as BatchNorm
from ._layers.conv import (
    Conv as Conv,
    Conv1d as Conv1d,
    Conv2d as Conv2d,
    Conv3d as Conv3d,
    ConvTranspose as ConvTranspose,
    ConvTranspose1d as ConvTranspose1d,
    ConvTranspose2d as ConvTranspose2d,
    ConvTranspose3d as ConvTranspose3d,
)
from ._layers.cross_entropy import linear_cross_entropy as linear_cross_entropy
from ._layers.elementwise import Dropout as Dropout, PReLU as PReLU
from ._layers.embedding import (
    Embedding as Embedding,
    LearnedPositionalEmbedding as LearnedPositionalEmbedding,
    RotaryPositionalEmbedding as RotaryPositionalEmbedding,
    SinusoidalPositionalEmbedding as SinusoidalPositionalEmbedding,
)
from ._layers.linear import (
    MLP as MLP,
    Einsum as Einsum,
    Identity as Identity,
    Linear as Linear,
)
from ._layers.norm import (
    GroupNorm as GroupNorm,
    InstanceNorm as InstanceNorm,
    LayerNorm as LayerNorm,
    RMSNorm as RMSNorm,
)
from ._layers.pool import (
    AdaptiveAvgPool1d as AdaptiveAvgPool1d,
    AdaptiveAvgPool2d as AdaptiveAvgPool2d,
    AdaptiveAvgPool3d as AdaptiveAvgPool3d,
    AdaptiveMaxPool1d as AdaptiveMaxPool1d,
    AdaptiveMaxPool2d as AdaptiveMaxPool2d,
    AdaptiveMaxPool3d as AdaptiveMaxPool3d,
    AdaptivePool as AdaptivePool,
    AvgPool1d as AvgPool1d,
    AvgPool2d as AvgPool2d,
    AvgPool3d as AvgPool3d,
    MaxPool1d as MaxPool1d,
    MaxPool2d as MaxPool2d,
    MaxPool3d as MaxPool3d,
    Pool as Pool,
    Upsample as Upsample,
    resize as resize,
)
from ._layers.sequential import Lambda as Lambda, Sequential as Sequential
from ._scale.mixed_precision import (
    DynamicLossScale as DynamicLossScale,
    Mixed as Mixed,
    NoLossScale as NoLossScale,
    Policy as Policy,
    StaticLossScale as StaticLossScale,
    all_finite as all_finite,
    mixed as mixed,
    precision as precision,
    select_tree as select_tree,
)
from ._scale.reversible import (
    ReversibleBlock as ReversibleBlock,
    ReversibleSequential as ReversibleSequential,
)
from ._scale.stacked import Stacked as Stacked
from ._sequence.generate import (
    Generation as Generation,
    generate as generate,
    sample_logits as sample_logits,
)
from ._sequence.recurrent import (
    RNN as RNN,
    Bidirectional as Bidirectional,
    GRUCell as GRUCell,
    LSTMCell as LSTMCell,
    scan_cell as scan_cell,
)

inference_mode = _tree_inference

_publish(globals(), __name__)
_describe_arguments(globals())

# Type checkers that see this take every name for one of the module.
if not _t.TYPE_CHECKING:

    def __getattr__(name: str) -> _t.NoReturn:
        raise _missing(__name__, name)
