"""One small call of every kind of operator that the recorded steps run on the device, as a trace spells them."""

from __future__ import annotations

from perfmodel.trace.operation import Argument, Operation, TensorSpec


def t(text: str) -> TensorSpec:
    return TensorSpec.parse(text)


def op(name: str, *inputs: Argument, **keywords: Argument) -> Operation:
    return Operation(f"aten.{name}", inputs, tuple(sorted(keywords.items())))


X, XB = t("float32[4,6]"), t("bfloat16[4,6]")
V = t("float32[6]")
LIST = (t("float32[4,6]"), t("float32[6]"))
STEPS = (t("float32[]@cpu"), t("float32[]@cpu"))
SCALARS = (-0.001, -0.002)
Q = t("float32[2,3,8,16]{384,16,48,1}")
QB = t("bfloat16[2,3,8,16]{384,16,48,1}")
LSE = t("float32[2,3,8]")
SEED = t("int64[]@cpu")
IMAGE, KERNEL = t("float32[2,3,8,8]"), t("float32[4,3,3,3]")
BN, C = t("float32[2,4,6,6]"), t("float32[4]")
POOLED = t("float32[2,4,3,3]")
CLS = t("float32[5,7]")
TOKENS = t("int64[2,4]")

OPERATIONS: list[Operation] = [
    op("_adaptive_avg_pool2d.default", IMAGE, (4, 4)),
    op("_adaptive_avg_pool2d_backward.default", t("float32[2,3,4,4]"), IMAGE),
    op("_foreach_add_.List", LIST, LIST, alpha=-0.01),
    op("_foreach_add_.Scalar", LIST, 1e-08),
    op("_foreach_add_.Tensor", STEPS, t("float32[]@cpu"), alpha=1.0),
    op("_foreach_addcdiv_.ScalarList", LIST, LIST, LIST, SCALARS),
    op("_foreach_addcmul_.Scalar", LIST, LIST, LIST, 0.001),
    op("_foreach_div_.ScalarList", LIST, (0.03, 0.03)),
    op("_foreach_lerp_.Scalar", LIST, LIST, 0.1),
    op("_foreach_mul_.Scalar", LIST, 0.9),
    op("_foreach_mul_.Tensor", LIST, t("float32[]")),
    op("_foreach_norm.Scalar", LIST, 2.0),
    op("_foreach_sqrt.default", LIST),
    op(
        "_fused_adamw_.default", LIST, LIST, LIST, LIST, (), (t("float32[]"), t("float32[]")),
        lr=0.001, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
    ),
    op("_amp_foreach_non_finite_check_and_unscale_.default", LIST, t("float32[]"), t("float32[]")),
    op("_amp_update_scale_.default", t("float32[]"), t("int32[]"), t("float32[]"), 2.0, 0.5, 2000),
    op("_local_scalar_dense.default", t("bool[]")),
    op("_log_softmax.default", CLS, 1, False),
    op("_log_softmax_backward_data.default", CLS, CLS, 1, "torch.float32"),
    op("_softmax.default", X, -1, False),
    op("_softmax_backward_data.default", X, X, -1, "torch.float32"),
    op("_scaled_dot_product_efficient_attention.default", Q, Q, Q, None, True, 0.1, True, scale=0.25),
    op(
        "_scaled_dot_product_efficient_attention_backward.default",
        Q, Q, Q, Q, None, Q, LSE, SEED, SEED, 0.1, (True, True, True, False), True, scale=0.25,
    ),
    op("_scaled_dot_product_cudnn_attention.default", QB, QB, QB, None, True, 0.1, True, scale=0.25),
    op(
        "_scaled_dot_product_cudnn_attention_backward.default",
        QB, QB, QB, QB, QB, t("float32[2,3,8,1]"), SEED, SEED, None, None, None, 8, 8, 0.1, True, scale=0.25,
    ),
    op("_scaled_dot_product_flash_attention.default", QB, QB, QB, 0.0, True, scale=0.25),
    op(
        "_scaled_dot_product_flash_attention_backward.default",
        QB, QB, QB, QB, QB, LSE, None, None, 8, 8, 0.0, True, t("uint64[2]"), t("uint64[]"), scale=0.25,
    ),
    op("_to_copy.default", X, dtype="torch.bfloat16", layout="torch.strided", device="cuda:0"),
    op("add.Tensor", X, V),
    op("add_.Tensor", X, X, alpha=-0.01),
    op("addcdiv_.default", X, X, X, value=-0.001),
    op("addcmul_.default", X, X, X, value=0.001),
    op("addmm.default", t("bfloat16[5]"), XB, t("bfloat16[6,5]{1,6}")),
    op("all.default", t("bool[4]")),
    op("arange.default", 8, device="cuda", pin_memory=False),
    op("bmm.default", t("float32[2,4,6]"), t("float32[2,6,5]{30,1,6}")),
    op("cat.default", (X, X), -1),
    op("clone.default", t("float32[4,6]{1,4}"), memory_format="torch.contiguous_format"),
    op("constant_pad_nd.default", TOKENS, (0, 1), -100.0),
    op("convolution.default", IMAGE, KERNEL, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1),
    op(
        "convolution_backward.default",
        t("float32[2,4,8,8]"), IMAGE, KERNEL, (0,), (1, 1), (1, 1), (1, 1), False, (0, 0), 1, (True, True, False),
    ),
    op("copy_.default", X, XB),
    op("cos.default", X),
    op("cudnn_batch_norm.default", BN, C, C, C, C, True, 0.1, 1e-5),
    op("cudnn_batch_norm_backward.default", BN, BN, C, C, C, C, C, 1e-5, t("uint8[0]")),
    op("cumsum.default", t("bool[2,4]"), -1),
    op("div.Scalar", X, 8.0),
    op("div.Tensor", X, X),
    op("div_.Tensor", X, t("float32[]")),
    op("embedding.default", t("float32[10,6]"), TOKENS),
    op("embedding_dense_backward.default", t("float32[2,4,6]"), TOKENS, 10, -1, False),
    op("eq.Scalar", TOKENS, 0),
    op("erf.default", X),
    op("exp.default", X),
    op("gather.default", t("int64[1,12]"), 1, t("int64[1,4]{12,1}")),
    op("gelu.default", X, approximate="tanh"),
    op("gelu_backward.default", X, X, approximate="tanh"),
    op("index.Tensor", X, (None, t("int64[3]"))),
    op("index_put_.default", X, (t("int64[3]"),), t("float32[3,6]"), True),
    op("masked_fill.Scalar", X, t("bool[4,6]"), float("-inf")),
    op("max_pool2d_with_indices.default", t("float32[2,4,6,6]"), (2, 2), (2, 2)),
    op(
        "max_pool2d_with_indices_backward.default",
        POOLED, t("float32[2,4,6,6]"), (2, 2), (2, 2), (0, 0), (1, 1), False, t("int64[2,4,3,3]"),
    ),
    op("mean.dim", X, (-1,), True),
    op("mm.default", X, t("float32[6,5]{1,6}")),
    op("mul.Scalar", X, 3.0),
    op("mul.Tensor", t("float32[4,6]{1,0}"), X),
    op("mul_.Tensor", X, t("float32[]")),
    op("native_batch_norm.default", BN, C, C, C, C, True, 0.1, 1e-5),
    op("native_batch_norm_backward.default", BN, BN, C, C, C, C, C, True, 1e-5, (True, True, True)),
    op("native_dropout.default", X, 0.1, True),
    op("native_dropout_backward.default", X, t("bool[4,6]"), 1.25),
    op("native_group_norm.default", BN, C, C, 2, 4, 36, 2, 1e-5),
    op("native_layer_norm.default", X, (6,), V, V, 1e-5),
    op(
        "native_layer_norm_backward.default",
        X, X, (6,), t("float32[4,1]"), t("float32[4,1]"), V, V, (True, True, True),
    ),
    op("ne.Scalar", TOKENS, 1),
    op("neg.default", X),
    op("new_zeros.default", X, (8,)),
    op("nll_loss_backward.default", t("float32[]"), CLS, t("int64[5]"), None, 1, -100, t("float32[]")),
    op("nll_loss_forward.default", CLS, t("int64[5]"), None, 1, -100),
    op("ones.default", (4, 4), dtype="torch.bool", device="cuda", pin_memory=False),
    op("ones_like.default", t("float32[]"), pin_memory=False, memory_format="torch.preserve_format"),
    op("pow.Tensor_Scalar", X, -0.5),
    op("relu_.default", X),
    op("rsqrt.default", X),
    op("scatter.value", CLS, 1, t("int64[5,1]"), -1.0),
    op("sigmoid.default", X),
    op("silu.default", XB),
    op("silu_backward.default", XB, XB),
    op("sin.default", X),
    op("slice_backward.default", X, (4, 12), 1, 6, 9223372036854775807, 1),
    op("sqrt_.default", X),
    op("sub.Tensor", t("int64[2,1]{0,1}"), 1),
    op("sum.dim_IntList", X, (0,), True),
    op("tanh.default", X),
    op("tanh_backward.default", X, X),
    op("threshold_backward.default", X, X, 0),
    op("triu.default", t("bool[4,4]"), 1),
    op("where.self", t("bool[4,6]"), X, t("float32[]")),
    op("zeros_like.default", X, memory_format="torch.preserve_format"),
]  # fmt: skip
