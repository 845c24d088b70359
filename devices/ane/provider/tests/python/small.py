# SPDX-License-Identifier: MIT OR Apache-2.0
"""Small models, each for one thing that a model can have. All give (model, inputs of several runs)."""

import numpy
from onnx import TensorProto, helper, numpy_helper

FLOAT, HALF, INT, BOOL = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64, TensorProto.BOOL
random = numpy.random.default_rng(7)


def info(name, kind, dims):
    return helper.make_tensor_value_info(name, kind, dims)


def make(nodes, inputs, outputs, weights=(), opset=17, domains=()):
    constants = [numpy_helper.from_array(value, name) for name, value in weights]
    graph = helper.make_graph(nodes, "small", inputs, outputs, constants)
    sets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=sets, ir_version=9).SerializeToString()


def normal(*shape, kind="float32"):
    return random.standard_normal(shape).astype(kind)


def convolution(kind=FLOAT, numpy_kind="float32"):
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1] * 4, auto_pad="NOTSET"),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    weights = [("w", normal(32, 3, 3, 3, kind=numpy_kind)), ("b", normal(32, kind=numpy_kind))]
    model = make(nodes, [info("x", kind, ["n", 3, "h", "w"])], [info("y", kind, ["n", 32, "h", "w"])], weights)
    return model, [{"x": normal(*shape, kind=numpy_kind)} for shape in [(1, 3, 8, 8), (2, 3, 8, 8), (1, 3, 17, 5), (1, 3, 8, 8)]]


def half():
    return convolution(HALF, "float16")


def integers():
    """64-bit integers as data and as indices, booleans, a scalar."""
    nodes = [
        helper.make_node("Gather", ["table", "index"], ["g"], axis=0),
        helper.make_node("Add", ["g", "one"], ["y"]),
        helper.make_node("Greater", ["y", "one"], ["z"]),
    ]
    weights = [("table", random.integers(-(2**62), 2**62, (300, 4))), ("one", numpy.array(1))]
    model = make(nodes, [info("index", INT, ["n"])], [info("y", INT, ["n", 4]), info("z", BOOL, ["n", 4])], weights)
    return model, [{"index": random.integers(0, 300, count)} for count in (1, 5, 300)]


def empty():
    """Nothing in, nothing out."""
    nodes = [helper.make_node("Concat", ["x", "w"], ["y"], axis=0), helper.make_node("Mul", ["x", "x"], ["z"])]
    model = make(nodes, [info("x", FLOAT, ["n", 4])], [info("y", FLOAT, ["m", 4]), info("z", FLOAT, ["n", 4])], [("w", normal(2, 4))])
    return model, [{"x": normal(count, 4)} for count in (0, 3, 0)]


def optional():
    """Inputs and outputs that are left out, in the middle and at the end."""
    nodes = [
        helper.make_node("Clip", ["x", "", "top"], ["c"]),
        helper.make_node("Resize", ["c", "", "", "sizes"], ["r"], mode="nearest"),
        helper.make_node("LSTM", ["seq", "w", "r_", "", "", "h"], ["", "y"], hidden_size=8, direction="bidirectional",
                         activations=["Sigmoid", "Tanh", "Tanh", "HardSigmoid", "Tanh", "Relu"], activation_alpha=[0.2], activation_beta=[0.5]),
    ]
    weights = [("top", numpy.float32(0.5)), ("sizes", numpy.array([1, 1, 4, 6])), ("w", normal(2, 32, 5)), ("r_", normal(2, 32, 8)), ("h", normal(2, 1, 8))]
    inputs = [info("x", FLOAT, [1, 1, 2, 3]), info("seq", FLOAT, ["t", 1, 5])]
    model = make(nodes, inputs, [info("r", FLOAT, [1, 1, 4, 6]), info("y", FLOAT, [2, 1, 8])], weights)
    return model, [{"x": normal(1, 1, 2, 3), "seq": normal(steps, 1, 5)} for steps in (1, 6)]


def constants():
    """Weights that are constants of the graph, an empty one among them, and an unknown rank in the middle."""
    value = numpy_helper.from_array(normal(64, 64))
    nodes = [
        helper.make_node("Constant", [], ["w"], value=value),
        helper.make_node("Constant", [], ["f"], value_floats=[1.0, 2.0]),
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Squeeze", ["m"], ["s"]),
        helper.make_node("ReduceSum", ["s"], ["y"], keepdims=0),
        helper.make_node("ConstantOfShape", ["shape"], ["z"], value=helper.make_tensor("v", FLOAT, [1], [3.0])),
    ]
    model = make(nodes, [info("x", FLOAT, ["n", 64]), info("shape", INT, [2])], [info("y", FLOAT, None), info("z", FLOAT, None)])
    return model, [{"x": normal(count, 64), "shape": numpy.array([count, 2])} for count in (2, 9)]


def branch():
    """A condition in the middle: what is around it goes to the host, it and its branches stay."""
    def one(operator):
        node = helper.make_node(operator, ["m", "w"], [operator + "_out"])
        return helper.make_graph([node], operator, [], [info(operator + "_out", FLOAT, ["n", 64])])

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("If", ["condition"], ["i"], then_branch=one("Add"), else_branch=one("MatMul")),
        helper.make_node("MatMul", ["i", "w"], ["y"]),
    ]
    inputs = [info("x", FLOAT, [64, 64]), info("condition", BOOL, [])]
    model = make(nodes, inputs, [info("y", FLOAT, [64, 64])], [("w", normal(64, 64))])
    return model, [{"x": normal(64, 64), "condition": numpy.array(value)} for value in (True, False)]


def growing():
    """A small input that makes a large output, then a larger one."""
    nodes = [helper.make_node("Expand", ["x", "shape"], ["y"])]
    model = make(nodes, [info("x", FLOAT, [1]), info("shape", INT, [2])], [info("y", FLOAT, ["a", "b"])])
    return model, [{"x": normal(1), "shape": numpy.array(shape)} for shape in ([2, 2], [1000, 700], [2, 2], [3000, 1000], [5, 5])]


def overridable():
    """An initialiser that an input may replace."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    weights = numpy_helper.from_array(normal(64, 64), "w")
    graph = helper.make_graph(nodes, "small", [info("x", FLOAT, [2, 64]), info("w", FLOAT, [64, 64])], [info("y", FLOAT, [2, 64])], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()
    return model, [{"x": normal(2, 64)}, {"x": normal(2, 64), "w": normal(64, 64)}]


def attention():
    nodes = [helper.make_node("Attention", ["q", "k", "v"], ["y"]), helper.make_node("MatMul", ["y", "w"], ["z"])]
    inputs = [info(name, FLOAT, [1, 2, 4, 8]) for name in "qkv"]
    model = make(nodes, inputs, [info("z", FLOAT, [1, 2, 4, 8])], [("w", normal(8, 8))], opset=23)
    return model, [{name: normal(1, 2, 4, 8) for name in "qkv"}]


def worthwhile():
    """Just enough work to be sent to the host unasked."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    model = make(nodes, [info("x", FLOAT, [128, 128])], [info("y", FLOAT, [128, 128])], [("w", normal(128, 128))])
    return model, [{"x": normal(128, 128)}]


def heavy():
    """Long enough to be caught in the middle of."""
    names = ["x", *(f"v{step}" for step in range(1, 20)), "y"]
    nodes = [helper.make_node("MatMul", [one, "w"], [other]) for one, other in zip(names, names[1:])]
    model = make(nodes, [info("x", FLOAT, [400, 400])], [info("y", FLOAT, [400, 400])], [("w", normal(400, 400) / 20)])
    return model, [{"x": normal(400, 400)}]


ALL = [convolution, half, integers, empty, optional, constants, branch, growing, overridable]
