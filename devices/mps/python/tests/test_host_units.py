# SPDX-License-Identifier: MIT OR Apache-2.0
"""Parts of the host that no stream over a processor shows: quick functions, ways around quirks, refusals of schemas.

Runs in a Python with torch; LIGHTER_TEST_TORCH may name its folder.
"""

import os
import subprocess
import sys
import unittest

import harness  # (puts the packages on the path)

if os.environ.get("LIGHTER_TEST_TORCH"):
    sys.path.append(os.environ["LIGHTER_TEST_TORCH"])

import torch  # noqa: E402
from lighter_mps_host import bindings, quirks, schemas  # noqa: E402
from lighter_mps_host.errors import Refusal  # noqa: E402

MPS = torch.device("mps")


def some():
    return torch.arange(6.0).reshape(2, 3) + 1


def plain(result):
    """A result's numbers."""
    return result.tolist() if isinstance(result, torch.Tensor) else [plain(entry) for entry in result]


class Quick(unittest.TestCase):
    CASES = (
        ("aten::add.Tensor", lambda: [some(), some()], {"alpha": 2}),
        ("aten::add.Tensor", lambda: [some(), 2.5], {}),
        ("aten::add_.Tensor", lambda: [some(), some()], {"alpha": 3}),
        ("aten::mul.Tensor", lambda: [torch.arange(3), 2.0], {}),
        ("aten::relu", lambda: [some()], {}),
        ("aten::addmm", lambda: [torch.ones(2), some(), some().t()], {"beta": 0.5}),
        ("aten::cat", lambda: [[some(), some()], 1], {}),
        ("aten::sum.dim_IntList", lambda: [some(), [1], True], {}),
        ("aten::sort", lambda: [some(), 1, True], {}),
        ("aten::gelu", lambda: [some()], {"approximate": "tanh"}),
        ("aten::abs.out", lambda: [some()], {"out": torch.empty(2, 3)}),
        ("aten::_foreach_add_.Scalar", lambda: [[some(), some()], 2], {}),
        ("aten::eq.Scalar", lambda: [some(), 2], {}),
        ("aten::index.Tensor", lambda: [some(), [torch.tensor([0, 1])]], {}),
        ("aten::native_layer_norm", lambda: [some(), [3], None, None, 1e-5], {}),
    )

    def test_a_quick_function_gives_what_the_overload_gives(self):
        found = 0
        with torch.inference_mode():
            for name, arguments, keywords in self.CASES:
                with self.subTest(name):
                    operator = schemas.find(name)
                    function = bindings.quick(operator, arguments(), keywords)
                    if function is None:
                        continue
                    found += 1
                    ours, theirs = function(*arguments(), **keywords), operator.call(*arguments(), **keywords)
                    # A foreach in place gives its list in one way and nothing in the other; the host uses neither.
                    self.assertTrue(not operator.returns or bindings.same(*map(plain, (ours, theirs))))
        self.assertGreater(found, 9)

    def test_nothing_runs_while_a_function_is_tried(self):
        tensor = some()
        with torch.inference_mode():
            self.assertIsNotNone(bindings.quick(schemas.find("aten::add_.Tensor"), [tensor, tensor], {}))
        self.assertTrue(torch.equal(tensor, some()))

    def test_torchs_compiler_is_not_imported_for_it(self):
        program = (
            "import sys; sys.path[:0] = sys.argv[1].split(':'); import torch; from lighter_mps_host import bindings, schemas\n"
            "with torch.inference_mode():\n"
            "    one = torch.ones(2); assert bindings.quick(schemas.find('aten::add.Tensor'), [one, one], {})\n"
            "assert 'torch._dynamo' not in sys.modules and 'sympy' not in sys.modules"
        )
        paths = os.pathsep.join([str(harness.ROOT), os.path.dirname(os.path.dirname(torch.__file__))])
        subprocess.run([sys.executable, "-I", "-B", "-c", program, paths], check=True)

    def test_another_overload_or_another_meaning_is_not_taken(self):
        with torch.inference_mode():
            # torch.add with a number is add.Tensor with a wrapped number, not add.Scalar.
            self.assertIsNone(bindings.quick(schemas.find("aten::add.Scalar"), [some(), 2.0], {}))
            operator = schemas.find("aten::sum.dim_IntList")
            tensor = some()
            self.assertFalse(bindings.complete(operator, [tensor, [1]], {}, [tensor, [1], True], {}))
            self.assertFalse(bindings.complete(operator, [some(), [1]], {}, [tensor, [1]], {}))
            self.assertTrue(bindings.complete(operator, [tensor, [1], False], {}, [tensor, [1]], {}))
        for one, other, equal in (
            (1, 1.0, False),
            (True, 1, False),
            (float("nan"), float("nan"), True),
            ([1], (1,), True),
        ):
            self.assertIs(bindings.same(one, other), equal)


class Quirks(unittest.TestCase):
    def test_the_list_holds_for_the_device_and_systems_that_it_names(self):
        operator = schemas.find("aten::addcdiv_")
        self.assertTrue(quirks.needs_contiguous(operator, MPS, (14, 6)))
        self.assertFalse(quirks.needs_contiguous(operator, MPS, (15, 0)))
        self.assertFalse(quirks.needs_contiguous(operator, torch.device("cpu"), (14, 6)))
        self.assertTrue(quirks.needs_contiguous(schemas.find("aten::bmm"), MPS, (26, 1)))
        self.assertFalse(quirks.needs_contiguous(schemas.find("aten::mm"), MPS, (14, 0)))
        self.assertIs(quirks.wrapped(operator, torch.device("cpu")), operator.call)

    def test_a_tensor_that_is_written_with_strides_gets_its_values(self):
        for make in (
            lambda operator: quirks.elsewhere(operator, torch.Tensor.contiguous),
            lambda operator: quirks.on_processor(operator, torch.device("cpu")),
        ):
            target, expected = some().t(), some().t()
            call = make(schemas.find("aten::addcdiv_"))
            self.assertIs(call(target, some().t(), some().t() + 1, value=2), target)
            self.assertTrue(torch.equal(target, expected.addcdiv_(some().t(), some().t() + 1, value=2)))
            self.assertEqual(target.stride(), (1, 3))
            out = torch.empty(3, 3)[:, :2]
            self.assertIs(make(schemas.find("aten::abs.out"))(some().t(), out=out), out)
            self.assertTrue(torch.equal(out, some().t()))
            values, order = make(schemas.find("aten::sort"))(some(), 1, True)
            self.assertTrue(torch.equal(values, some().sort(1, True)[0]))
            made = make(schemas.find("aten::full"))([2], 3.0, device=torch.device("cpu"))
            self.assertEqual(made.tolist(), [3, 3])


class Schemas(unittest.TestCase):
    def test_types_are_compared_without_what_does_not_matter(self):
        arguments = schemas.find("aten::sum.dim_IntList").arguments
        self.assertTrue(schemas.same_type("Optional[List[int]]", arguments["dim"]))
        self.assertTrue(schemas.same_type("List[int]", arguments["dim"]))
        self.assertTrue(schemas.same_type("Optional[int]", arguments["dtype"]))
        self.assertFalse(schemas.same_type("Tensor", arguments["dim"]))
        self.assertFalse(schemas.same_type("bool", arguments["dtype"]))

    def test_no_operator_that_may_run_makes_views_or_takes_what_is_not_carried(self):
        may = refused = 0
        for name in sorted(schemas.registered()):
            try:
                operator = schemas.find(name)
            except Refusal:
                refused += 1
                continue
            may += 1
            for result in operator.returns:
                self.assertTrue(result.alias_info is None or result.alias_info.is_write, name)
            self.assertFalse(
                any("Storage" in str(a.type) or "Stream" in str(a.type) for a in operator.arguments.values()), name
            )
        self.assertGreater(may, 1500)
        self.assertGreater(refused, 100)


if __name__ == "__main__":
    unittest.main()
