# SPDX-License-Identifier: MIT OR Apache-2.0
"""One case a call: what a program with a stock ONNX Runtime sees of the plug-in. Ends with an error when it is wrong.

usage: cases.py CASE…
"""

import gc
import os
import subprocess
import sys
import threading
import time

import numpy
import onnxruntime

import kit
import small


def each_small_model(host, devices):
    for transport in ("shm", "stream"):
        for make in small.ALL:
            before = host.runs
            model, inputs = make()
            expected, got = kit.reference(model), kit.session(model, devices, host, transport)
            for one in inputs:
                kit.same(got.run(None, one), expected.run(None, one))
            groups = 2 if make is small.branch else 1
            ran = host.runs - before
            assert ran == groups * len(inputs), f"{make.__name__} over {transport}: {ran} runs on the host"
            print(f"{make.__name__} over {transport}: {ran} runs on the host, equal")
    if host.is_real:
        return
    assert host.events("grown"), "no ring had to grow"
    models = host.events("model")
    assert {event["sent"] for event in models} == {True, False}, "the second transport finds the models there"


def real_models(host, devices):
    datasets = os.path.join(os.path.dirname(onnxruntime.__file__), "datasets")
    random = numpy.random.default_rng(1)
    named = [os.path.join(datasets, name) for name in ("mul_1.onnx", "sigmoid.onnx")]
    named += [os.path.join(kit.MODELS, name) for name in (
        "ch_ppocr_mobile_v2.0_cls_infer.onnx", "ch_PP-OCRv4_det_infer.onnx", "magika.onnx", "silero_vad_op18_ifless.onnx",
        "silero_vad_half.onnx", "silero_vad.onnx", "resnet50.onnx", "resnet50-external.onnx")]
    for path in named:
        name = os.path.basename(path)
        expected, got = kit.reference(path), kit.session(path, devices, host)
        inputs = kit.feed(expected, random)
        if "silero" in name:
            inputs = silero(expected, random)
        elif "det_infer" in name:
            inputs = {"x": random.standard_normal((1, 3, 160, 160)).astype("float32")}
        elif "ppocr" in name:
            inputs = {"x": random.standard_normal((1, 3, 48, 192)).astype("float32")}
        before = host.runs
        for _ in range(2):
            kit.same(got.run(None, inputs), expected.run(None, inputs))
        ran = host.runs - before
        assert ran >= 2, f"{name}: {ran} runs on the host"
        print(f"{name}: {ran} runs on the host, equal")
        del expected, got


def silero(made, random):
    inputs = {}
    for one in made.get_inputs():
        if one.type == "tensor(int64)":
            inputs[one.name] = numpy.array(16000)
        elif one.name == "input":
            inputs[one.name] = (random.standard_normal((1, 576 if "context" in one.name else 512)) * 0.1).astype("float32")
        else:
            shape = [dim if isinstance(dim, int) else 1 for dim in one.shape]
            inputs[one.name] = numpy.zeros(shape, "float32")
    return inputs


def device(host, devices):
    """What the runtime says of it, and that a policy finds it without a name."""
    (one,) = devices
    assert one.device.type == onnxruntime.OrtHardwareDeviceType.NPU, one.device.type
    assert one.ep_vendor == "Lighter", one.ep_vendor
    os.environ["LIGHTER_ANE"] = "/nonexistent"  # too late to be seen: the process's own start counts
    model, inputs = small.convolution()
    made = kit.options(**{"ep.lighterane.socket": host.socket, "ep.lighterane.min_work": "0"})
    made.set_provider_selection_policy(onnxruntime.OrtExecutionProviderDevicePolicy.PREFER_NPU)
    before = host.runs
    kit.same(onnxruntime.InferenceSession(model, made).run(None, inputs[0]), kit.reference(model).run(None, inputs[0]))
    assert host.runs == before + 1
    made = kit.options(**{"ep.lighterane.socket": host.socket, "ep.lighterane.min_work": "0"})
    made.set_provider_selection_policy(onnxruntime.OrtExecutionProviderDevicePolicy.PREFER_CPU)
    onnxruntime.InferenceSession(model, made).run(None, inputs[0])
    assert host.runs == before + 1, "who prefers the processor gets it"


def settings(host, devices):
    """The gate for small groups, pins, and options that are wrong."""
    model, inputs = small.convolution()
    before = host.runs
    kit.session(model, devices, host, min_work="100000000").run(None, inputs[0])
    assert host.runs == before, "too little work to be sent"
    kit.session(model, devices, host, units="gpu").run(None, inputs[0])
    assert host.runs == before + 1 and host.events("hello")[-1]["units"] == "gpu"
    version = [int(part) for part in onnxruntime.__version__.split(".")]
    assert host.events("hello")[-1]["ort"] == version
    try:
        # With the fall-back of Python's class the program would go on without the device.
        kit.session(model, devices, host, transport="pigeon", fallback=0)
    except Exception as error:
        assert "pigeon" in str(error) and "transport" in str(error), error
    else:
        raise AssertionError("a transport that there is not")


def binding(host, devices):
    for transport in ("shm", "stream"):
        model, inputs = small.convolution()
        got, expected = kit.session(model, devices, host, transport), kit.reference(model)
        for one in inputs:
            bound = got.io_binding()
            bound.bind_cpu_input("x", one["x"])
            bound.bind_output("y")
            got.run_with_iobinding(bound)
            kit.same(bound.copy_outputs_to_cpu(), expected.run(None, one))
            shape = (one["x"].shape[0], 32, *one["x"].shape[2:])
            place = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, numpy.float32)
            bound = got.io_binding()
            bound.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(one["x"]))
            bound.bind_ortvalue_output("y", place)
            got.run_with_iobinding(bound)
            kit.same([place.numpy()], expected.run(None, one))
    assert host.runs == 16, host.runs


def threads(host, devices):
    """Eight at a time on one session, shapes mixed."""
    model, inputs = small.convolution()
    expected = kit.reference(model)
    answers = [expected.run(None, one) for one in inputs]
    for transport in ("shm", "stream"):
        got, wrong, before = kit.session(model, devices, host, transport), [], host.runs

        def work(start):
            for step in range(40):
                at = (start + step) % len(inputs)
                try:
                    kit.same(got.run(None, inputs[at]), answers[at])
                except Exception as error:
                    wrong.append(error)

        workers = [threading.Thread(target=work, args=(start,)) for start in range(8)]
        [worker.start() for worker in workers]
        [worker.join() for worker in workers]
        assert not wrong, wrong[0]
        assert host.runs - before == 320, host.runs - before


def fork(host, devices):
    """Parent and children run the same session at once; nobody gets another's answer."""
    model, _ = small.convolution()
    inputs = [{"x": small.normal(1, 3, 8, 8)} for _ in range(6)]
    expected = kit.reference(model)
    answers = [expected.run(None, one) for one in inputs]
    for transport in ("shm", "stream"):
        got, before, children = kit.session(model, devices, host, transport), host.runs, []
        kit.same(got.run(None, inputs[0]), answers[0])
        for child in range(3):
            number = os.fork()
            if number == 0:
                code = 1
                try:
                    for step in range(30):
                        at = (child + step) % 6
                        kit.same(got.run(None, inputs[at]), answers[at])
                    code = 0
                finally:
                    os._exit(code)
            children.append(number)
        for step in range(30):
            kit.same(got.run(None, inputs[step % 6]), answers[step % 6])
        codes = [os.waitpid(number, 0)[1] for number in children]
        assert codes == [0, 0, 0], codes
        assert host.runs - before == 121, host.runs - before


def fork_alone(host, devices):
    """A child whose host is gone computes by itself."""
    model, inputs = small.convolution()
    got, answers = kit.session(model, devices, host), kit.reference(model).run(None, inputs[0])
    kit.same(got.run(None, inputs[0]), answers)
    host.kill()
    kit.same(got.run(None, inputs[0]), answers)
    number = os.fork()
    if number == 0:
        code = 1
        try:
            for _ in range(3):
                kit.same(got.run(None, inputs[0]), answers)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(number, 0)[1] == 0
    kit.same(got.run(None, inputs[0]), answers)


def unregister(host, devices):
    """The library goes before the session: what keeps the session alive must not call into nothing."""
    model, inputs = small.convolution()
    got = kit.session(model, devices, host)
    got.run(None, inputs[0])
    kept = list(got.get_inputs())
    del got, devices
    gc.collect()
    onnxruntime.unregister_execution_provider_library("lighter")
    assert kept[0].name == "x"


def many_sessions(host, devices):
    """Sessions by the hundred leave no descriptors behind."""
    model, inputs = small.convolution()
    answers = kit.reference(model).run(None, inputs[0])

    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    kit.session(model, devices, host).run(None, inputs[0])
    before = descriptors()
    for _ in range(200):
        kit.same(kit.session(model, devices, host).run(None, inputs[0]), answers)
    assert descriptors() <= before, (before, descriptors())
    assert host.runs == 201, host.runs
    assert host.is_real or sum(event["sent"] for event in host.events("model")) == 1


def killed(host, devices):
    """The host dies in mid-run and comes back: one slow run, nothing wrong, and runs there again."""
    model, (inputs,) = small.heavy()
    answers = kit.reference(model).run(None, inputs)
    for transport in ("shm", "stream"):
        got = kit.session(model, devices, host, transport)
        kit.same(got.run(None, inputs), answers)
        models = len(host.events("model"))

        def restart():
            time.sleep(0.03)
            host.kill()
            host.start()

        for _ in range(2):
            killer = threading.Thread(target=restart)
            killer.start()
            while killer.is_alive():
                kit.same(got.run(None, inputs), answers)
            # A host that takes longer to start than the patience lasts is looked at again after a while.
            last, deadline = host.runs, time.monotonic() + 60
            while host.runs < last + 3:
                kit.same(got.run(None, inputs), answers)
                assert time.monotonic() < deadline, "runs are on the host again"
        assert host.is_real or any(event["sent"] for event in host.events("model")[models:]), "the model was sent anew"


def gone(host, devices):
    """The host is gone for good: the container computes, and says so once."""
    model, inputs = small.branch()
    expected = kit.reference(model)
    got = kit.session(model, devices, host)
    kit.same(got.run(None, inputs[0]), expected.run(None, inputs[0]))
    host.kill()
    for _ in range(20):
        for one in inputs:
            kit.same(got.run(None, one), expected.run(None, one))


def never_there(_, devices):
    """No service at all: nothing is claimed, the session works."""
    model, inputs = small.convolution()
    got = kit.session(model, devices, "/nonexistent/socket")
    kit.same(got.run(None, inputs[0]), kit.reference(model).run(None, inputs[0]))


def own_errors(host, devices):
    """An error of the program's own is the runtime's own error."""
    model, _ = small.integers()
    got = kit.session(model, devices, host)
    got.disable_fallback()
    try:
        got.run(None, {"index": numpy.array([1000])})
    except Exception as error:
        assert "1000" in str(error) or "bounds" in str(error), error
    else:
        raise AssertionError("an index beyond the table")
    kit.same(got.run(None, {"index": numpy.array([7])}), kit.reference(model).run(None, {"index": numpy.array([7])}))


def bound(_, devices):
    """A host that makes a session for each shape, as engines other than the processor need it."""
    host = kit.Host("bind")
    try:
        for make in (small.convolution, small.optional, small.integers, small.empty):
            model, inputs = make()
            got, expected, before = kit.session(model, devices, host), kit.reference(model), host.runs
            for one in inputs:
                for value, other in zip(got.run(None, one), expected.run(None, one)):
                    numpy.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-5)
            assert host.runs - before == len(inputs)
    finally:
        host.end()


def onnx_node_tests(host, devices):
    """ONNX's own tests of single operators: whatever the processor runs gives the same through the device; nearly the
    same (LIGHTER_TEST_CLOSE=1) where the two runtimes are of different versions, whose kernels differ in the last bit."""
    import warnings

    warnings.simplefilter("ignore")
    from onnx.backend.test.case.node import collect_testcases

    counts, wrong = {"equal": 0, "not comparable": 0}, []
    for case in collect_testcases(None):
        model = case.model.SerializeToString()
        for inputs, _ in case.data_sets:
            names = [one.name for one in case.model.graph.input]
            feed = dict(zip(names, inputs))
            try:
                expected = kit.reference(model).run(None, feed)
            except Exception:
                counts["not comparable"] += 1
                continue
            try:
                got = kit.session(model, devices, host).run(None, feed)
                equal = all(alike(one, other) for one, other in zip(got, expected))
            except Exception as error:
                equal = str(error)
            if equal is True:
                counts["equal"] += 1
            else:
                wrong.append(f"{case.name}: {equal or 'another answer'}")
    print(f"{counts}, {len(wrong)} wrong, {host.runs} runs on the host")
    assert not wrong, wrong
    assert host.runs > 1000, "the device ran most of them"


def alike(one, other):
    if not isinstance(one, numpy.ndarray):
        return str(one) == str(other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.tobytes() == other.tobytes() or one.dtype == object:
        return one.dtype != object or one.tolist() == other.tolist()
    if one.dtype.kind != "f":
        return False
    close = {"rtol": 1e-4, "atol": 1e-6} if os.environ.get("LIGHTER_TEST_CLOSE") == "1" else {"rtol": 0, "atol": 0}
    return numpy.allclose(one, other, equal_nan=True, **close)


def large(host, devices):
    """More weights than a protobuf can hold."""
    from onnx import helper, numpy_helper, save, TensorProto

    side, layers = 8192, 9
    path = os.path.join(kit.FOLDER, "large.onnx")
    weights = [numpy_helper.from_array(numpy.full((side, side), layer + 1, "float32"), f"w{layer}") for layer in range(layers)]
    values = ["x", *(f"v{layer}" for layer in range(1, layers)), "y"]
    nodes = [helper.make_node("MatMul", [values[layer], f"w{layer}"], [values[layer + 1]]) for layer in range(layers)]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, side])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, side])]
    graph = helper.make_graph(nodes, "large", inputs, outputs, weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    save(made, path, save_as_external_data=True, location="large.weights")
    del made, graph, weights
    x = {"x": numpy.full((1, side), 2.0**-60, "float32")}
    expected = kit.reference(path).run(None, x)
    gc.collect()
    kit.same(kit.session(path, devices, host).run(None, x), expected)
    assert host.runs == 1
    for name in ("large.onnx", "large.weights"):
        os.unlink(os.path.join(kit.FOLDER, name))


def helper(name, environment, *command):
    """Runs a program as it would run in a container with this environment."""
    folder = os.path.join(kit.HERE, "../../../python")
    whole = {**os.environ, "LIGHTER_ANE_EP": kit.LIBRARY, **environment}
    if name == "auto":
        whole["PYTHONPATH"] = folder + os.pathsep + whole["PYTHONPATH"]
        command = (sys.executable, *command)
    else:
        command = (os.path.join(folder, "lighter-ane-check"), *command)
        whole["LIGHTER_ANE_PYTHON"] = sys.executable
    child = subprocess.run(command, env=whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return child.returncode, child.stdout


# A program that knows nothing of the device.
UNMODIFIED = """
import sys, onnxruntime as ort, numpy
options = ort.SessionOptions()
image = numpy.ones((128, 128), "float32")
for providers in (None, ["CPUExecutionProvider"], ort.get_available_providers()):
    for given in (None, options, options):
        session = ort.InferenceSession(sys.argv[1], given, providers)
        print(session.run(None, {"x": image})[0].sum(), session.get_providers())
"""


def auto(host, _):
    """The opt-in hook: an unmodified program uses the device, and runs where there is none, or nothing to do."""
    path, program = os.path.join(kit.FOLDER, "model.onnx"), os.path.join(kit.FOLDER, "program.py")
    with open(path, "wb") as model, open(program, "w") as text:
        model.write(small.worthwhile()[0])
        text.write(UNMODIFIED)
    on = {"LIGHTER_ANE_AUTO": "1", "LIGHTER_ANE": host.socket}
    code, said = helper("auto", on, program, path)
    assert code == 0 and said.count("LighterANE") == 9, said
    assert host.runs == 9, (host.runs, said)
    for environment, expected in (
        ({}, ""),
        ({**on, "LIGHTER_ANE_AUTO": "0"}, ""),
        ({**on, "LIGHTER_ANE_EP": "/nonexistent.so"}, "/nonexistent.so is not there"),
    ):
        code, said = helper("auto", environment, program, path)
        assert code == 0 and "LighterANE" not in said and expected in said and said.count("lighter-ane:") <= 1, said
    code, said = helper("auto", {**on, "LIGHTER_ANE": "/nonexistent"}, program, path)
    assert code == 0 and said.count("does not answer") == 1, said
    code, said = helper("auto", on, "-S", "-c", "print(1)")
    assert (code, said) == (0, "1\n"), said
    code, said = helper("auto", on, "-c", "import lighter_ane_auto, json; print(1)")
    assert (code, said) == (0, "1\n"), said
    assert host.runs == 9, host.runs


def check(host, _):
    """The self-test says what is wrong, at the step where it is."""
    on = {"LIGHTER_ANE": host.socket}
    code, said = helper("check", on)
    assert code == 0 and "1 runs on the host" in said and "The device works." in said, said
    path = os.path.join(kit.FOLDER, "model.onnx")
    with open(path, "wb") as model:
        model.write(small.branch()[0])
    code, said = helper("check", on, path)
    assert code == 0 and "model.onnx" in said, said
    for environment, expected in (
        ({**on, "LIGHTER_ANE_EP": "/nonexistent.so"}, "/nonexistent.so is not there"),
        ({"LIGHTER_ANE": "/nonexistent"}, "/nonexistent is not there"),
        ({**on, "PYTHONPATH": ""}, "no onnxruntime for"),
    ):
        code, said = helper("check", environment)
        assert code == 1 and "WRONG" in said and expected in said, said
    host.kill()
    code, said = helper("check", on)
    assert code == 1 and "does not answer" in said, said


def mischief(kind, on_host):
    """A host that does this: right answers all the same, and so many runs on it."""

    def case(_, devices):
        host = kit.Host(kind)
        try:
            for transport in ("shm", "stream"):
                if kind == "beyond" and transport == "stream":
                    continue
                model, inputs = small.attention() if kind == "other-ort" else small.convolution()
                expected, before = kit.reference(model), host.runs
                got = kit.session(model, devices, host, transport)
                for _ in range(3):
                    kit.same(got.run(None, inputs[0]), expected.run(None, inputs[0]))
                ran = host.runs - before
                assert ran == on_host, f"{kind} over {transport}: {ran} runs on the host"
        finally:
            host.end()

    return case


MISCHIEF = {
    "again": mischief("again", 3),
    "not_these": mischief("not-these", 0),
    "refuse": mischief("refuse", 0),
    "other_version": mischief("other-version", 0),
    # Attention stays in the container, what follows it goes to the host.
    "other_ort": mischief("other-ort", 3),
    "wrong_type": mischief("wrong-type", 1),
    "beyond": mischief("beyond", 1),
}
CASES = {
    **{case.__name__: case for case in (
        each_small_model, real_models, device, settings, binding, threads, fork, fork_alone, many_sessions, killed,
        gone, never_there, own_errors, bound, auto, check, onnx_node_tests, large, unregister)},
    **MISCHIEF,
}
# They start a host of their own, or none.
ALONE = {never_there, bound, *MISCHIEF.values()}


def too_old():
    """A runtime that is too old is told so, in words that help."""
    try:
        kit.register()
    except Exception as error:
        assert "needs ONNX Runtime 1.24 or newer" in str(error), error
    else:
        raise AssertionError(f"ONNX Runtime {onnxruntime.__version__} took the library")
    print("ok too_old")


def main():
    if sys.argv[1:] == ["too_old"]:
        return too_old()
    devices = kit.register()
    for name in sys.argv[1:]:
        started, case = time.monotonic(), CASES[name]
        start = kit.Service if "LIGHTER_TEST_ANE_SERVE" in os.environ else kit.Host
        host = None if case in ALONE else start()
        try:
            case(host, devices)
            print(f"ok {name} ({time.monotonic() - started:.1f} s)", flush=True)
        finally:
            if host is not None:
                host.end()


if __name__ == "__main__":
    main()
