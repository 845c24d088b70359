// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations by name, and their numbers in each age of ggml.
//!
//! The protocol carries ggml's enum values, and ggml inserts into the middle of its enums, also within one
//! major. So a number is turned into a name by the client's table, and the name into the engine's number. A
//! major that spans several tables gives several [`candidates`]: a graph that was read with the wrong one does
//! not pass the shape checks, since its operations then have the wrong inputs.

use super::version::Major;

macro_rules! ops {
    ($($op:ident = $name:literal,)*) => {
        /// An operation; the order is ggml 0.27's.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[expect(missing_docs, reason = "the names are ggml's own")]
        #[repr(u8)]
        pub enum Op { $($op,)* }

        /// All operations, in ggml 0.27's order.
        pub const LATEST_OPS: &[Op] = &[$(Op::$op,)*];

        impl Op {
            /// ggml's name of it.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$op => $name,)* }
            }
        }
    };
}

ops! {
    None = "NONE",
    Dup = "DUP",
    Add = "ADD",
    AddId = "ADD_ID",
    Add1 = "ADD1",
    Acc = "ACC",
    Sub = "SUB",
    Mul = "MUL",
    Div = "DIV",
    Sqr = "SQR",
    Sqrt = "SQRT",
    Log = "LOG",
    Sin = "SIN",
    Cos = "COS",
    Sum = "SUM",
    SumRows = "SUM_ROWS",
    Cumsum = "CUMSUM",
    Mean = "MEAN",
    Argmax = "ARGMAX",
    CountEqual = "COUNT_EQUAL",
    Repeat = "REPEAT",
    RepeatBack = "REPEAT_BACK",
    Concat = "CONCAT",
    SiluBack = "SILU_BACK",
    Norm = "NORM",
    RmsNorm = "RMS_NORM",
    RmsNormBack = "RMS_NORM_BACK",
    GroupNorm = "GROUP_NORM",
    L2Norm = "L2_NORM",
    MulMat = "MUL_MAT",
    MulMatId = "MUL_MAT_ID",
    OutProd = "OUT_PROD",
    Scale = "SCALE",
    Set = "SET",
    Cpy = "CPY",
    Cont = "CONT",
    Reshape = "RESHAPE",
    View = "VIEW",
    Permute = "PERMUTE",
    Transpose = "TRANSPOSE",
    GetRows = "GET_ROWS",
    GetRowsBack = "GET_ROWS_BACK",
    SetRows = "SET_ROWS",
    Diag = "DIAG",
    DiagMaskInf = "DIAG_MASK_INF",
    DiagMaskZero = "DIAG_MASK_ZERO",
    SoftMax = "SOFT_MAX",
    SoftMaxBack = "SOFT_MAX_BACK",
    Rope = "ROPE",
    RopeBack = "ROPE_BACK",
    Clamp = "CLAMP",
    ConvTranspose1d = "CONV_TRANSPOSE_1D",
    Im2col = "IM2COL",
    Im2colBack = "IM2COL_BACK",
    Im2col3d = "IM2COL_3D",
    Col2im1d = "COL2IM_1D",
    Conv2d = "CONV_2D",
    Conv3d = "CONV_3D",
    Conv2dDw = "CONV_2D_DW",
    ConvTranspose2d = "CONV_TRANSPOSE_2D",
    Pool1d = "POOL_1D",
    Pool2d = "POOL_2D",
    Pool2dBack = "POOL_2D_BACK",
    Upscale = "UPSCALE",
    Pad = "PAD",
    PadReflect1d = "PAD_REFLECT_1D",
    Roll = "ROLL",
    Arange = "ARANGE",
    TimestepEmbedding = "TIMESTEP_EMBEDDING",
    Argsort = "ARGSORT",
    TopK = "TOP_K",
    LeakyRelu = "LEAKY_RELU",
    Tri = "TRI",
    Fill = "FILL",
    FlashAttnExt = "FLASH_ATTN_EXT",
    FlashAttnBack = "FLASH_ATTN_BACK",
    SsmConv = "SSM_CONV",
    SsmScan = "SSM_SCAN",
    WinPart = "WIN_PART",
    WinUnpart = "WIN_UNPART",
    GetRelPos = "GET_REL_POS",
    AddRelPos = "ADD_REL_POS",
    RwkvWkv6 = "RWKV_WKV6",
    GatedLinearAttn = "GATED_LINEAR_ATTN",
    RwkvWkv7 = "RWKV_WKV7",
    SolveTri = "SOLVE_TRI",
    GatedDeltaNet = "GATED_DELTA_NET",
    LightningIndexer = "LIGHTNING_INDEXER",
    Dsv4HcComb = "DSV4_HC_COMB",
    Dsv4HcPre = "DSV4_HC_PRE",
    Dsv4HcPost = "DSV4_HC_POST",
    Unary = "UNARY",
    MapCustom1 = "MAP_CUSTOM1",
    MapCustom2 = "MAP_CUSTOM2",
    MapCustom3 = "MAP_CUSTOM3",
    Custom = "CUSTOM",
    CrossEntropyLoss = "CROSS_ENTROPY_LOSS",
    CrossEntropyLossBack = "CROSS_ENTROPY_LOSS_BACK",
    OptStepAdamw = "OPT_STEP_ADAMW",
    OptStepSgd = "OPT_STEP_SGD",
    Glu = "GLU",
}

/// Names of the unary operations as ggml says them, in 0.27's order.
pub const LATEST_UNARY_OPS: &[&str] = &[
    "ABS",
    "SGN",
    "NEG",
    "STEP",
    "TANH",
    "ELU",
    "RELU",
    "SIGMOID",
    "GELU",
    "GELU_QUICK",
    "SILU",
    "HARDSWISH",
    "HARDSIGMOID",
    "EXP",
    "EXPM1",
    "SOFTPLUS",
    "GELU_ERF",
    "XIELU",
    "FLOOR",
    "CEIL",
    "ROUND",
    "TRUNC",
];

/// An age of ggml whose enums are the same: its first version, and what later versions inserted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Era {
    /// ggml's version that began it.
    pub since: &'static str,
    missing_ops: &'static [Op],
    missing_unary: &'static [&'static str],
}

const ERA_0_17: Era = Era { since: "0.17", missing_ops: &[], missing_unary: &[] };
const ERA_0_15: Era = Era {
    since: "0.15",
    missing_ops: &[Op::LightningIndexer, Op::Dsv4HcComb, Op::Dsv4HcPre, Op::Dsv4HcPost],
    missing_unary: &[],
};
const ERA_0_9_8: Era = Era {
    since: "0.9.8",
    missing_ops: &[Op::Col2im1d, Op::LightningIndexer, Op::Dsv4HcComb, Op::Dsv4HcPre, Op::Dsv4HcPost],
    missing_unary: &[],
};
const ERA_0_9_5: Era = Era {
    since: "0.9.5",
    missing_ops: &[
        Op::Col2im1d,
        Op::GatedDeltaNet,
        Op::LightningIndexer,
        Op::Dsv4HcComb,
        Op::Dsv4HcPre,
        Op::Dsv4HcPost,
    ],
    missing_unary: &[],
};
const ERA_0_9_1: Era = Era {
    since: "0.9.1",
    missing_ops: &[
        Op::Cumsum,
        Op::TopK,
        Op::Tri,
        Op::Fill,
        Op::SolveTri,
        Op::Col2im1d,
        Op::GatedDeltaNet,
        Op::LightningIndexer,
        Op::Dsv4HcComb,
        Op::Dsv4HcPre,
        Op::Dsv4HcPost,
    ],
    missing_unary: &["EXPM1", "SOFTPLUS", "XIELU", "FLOOR", "CEIL", "ROUND", "TRUNC"],
};

/// The ages that clients of a major may come from, newest first.
#[must_use]
pub fn candidates(major: Major) -> &'static [Era] {
    match major.number() {
        2 => &[ERA_0_9_1],
        3 => &[ERA_0_9_8, ERA_0_9_5, ERA_0_9_1],
        4 => &[ERA_0_17, ERA_0_15, ERA_0_9_8],
        _ => &[ERA_0_17],
    }
}

fn nth_present<T: Copy + PartialEq>(all: &[T], missing: &[T], number: usize) -> Option<T> {
    all.iter().filter(|item| !missing.contains(item)).nth(number).copied()
}

impl Era {
    /// The operation of a number.
    #[must_use]
    pub fn op(&self, number: u32) -> Option<Op> {
        nth_present(LATEST_OPS, self.missing_ops, usize::try_from(number).ok()?)
    }

    /// All its operations by number.
    #[must_use]
    pub fn ops(&self) -> Vec<Op> {
        LATEST_OPS.iter().filter(|op| !self.missing_ops.contains(op)).copied().collect()
    }

    /// The name of a unary operation's number.
    #[must_use]
    pub fn unary(&self, number: i32) -> Option<&'static str> {
        nth_present(LATEST_UNARY_OPS, self.missing_unary, usize::try_from(number).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(era: &Era, op: Op) -> usize {
        era.ops().iter().position(|other| *other == op).unwrap()
    }

    #[test]
    fn each_age_has_as_many_operations_as_its_ggml() {
        for (era, ops, unary) in [
            (ERA_0_9_1, 90, 15),
            (ERA_0_9_5, 95, 22),
            (ERA_0_9_8, 96, 22),
            (ERA_0_15, 97, 22),
            (ERA_0_17, 101, 22),
        ] {
            assert_eq!(era.ops().len(), ops, "{}", era.since);
            assert!(era.op(u32::try_from(ops).unwrap()).is_none());
            assert!(era.op(u32::try_from(ops - 1).unwrap()) == Some(Op::Glu));
            assert!(era.unary(unary - 1).is_some() && era.unary(unary).is_none());
        }
    }

    #[test]
    fn numbers_shift_where_ggml_inserted() {
        assert_eq!((number(&ERA_0_9_1, Op::MulMat), number(&ERA_0_17, Op::MulMat)), (28, 29));
        assert_eq!((number(&ERA_0_9_1, Op::Unary), number(&ERA_0_9_5, Op::Unary)), (80, 85));
        assert_eq!((number(&ERA_0_9_8, Op::Unary), number(&ERA_0_15, Op::Unary)), (86, 87));
        assert_eq!(number(&ERA_0_17, Op::Unary), 91);
        assert_eq!(ERA_0_9_1.unary(14), Some("GELU_ERF"));
        assert_eq!(ERA_0_17.unary(14), Some("EXPM1"));
        assert_eq!(ERA_0_17.unary(-1), None);
    }
}
