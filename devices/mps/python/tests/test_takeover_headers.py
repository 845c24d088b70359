# SPDX-License-Identifier: MIT OR Apache-2.0
"""The reader of C++ headers: what it understands, and what it refuses rather than to guess."""

import itertools
import unittest

from takeover_support import takeover

headers = takeover("headers")


def names(source: str, name: str = "C") -> "list[str]":
    return headers.order(headers.parse(source, name))


class Understands(unittest.TestCase):
    def test_plain_methods_in_order(self):
        self.assertEqual(names("struct C { virtual int b() const = 0; virtual void a(); int c(); };"), ["b", "a"])

    def test_a_destructor_has_two_slots(self):
        self.assertEqual(names("class C { public: virtual ~C() = default; virtual void a(); };"), ["~", "~delete", "a"])

    def test_export_macros_attributes_and_final(self):
        for key in ("struct TORCH_API C", "class C10_API C final", "struct [[nodiscard]] C", "struct ALIGNED(8) C",
                    "class __attribute__((visibility(\"default\"))) C"):
            self.assertEqual(names(key + " { virtual void a(); };"), ["a"], key)

    def test_comments(self):
        source = """
        // struct C { virtual void no(); };
        struct C { // virtual void no();
          /* virtual void no(); } */ virtual /* a { */ void a(int /* ) */ x); // it's
          // a line that goes on \\
          virtual void no();
          virtual void b();
        };"""
        self.assertEqual(names(source), ["a", "b"])

    def test_literals(self):
        source = r"""
        struct C {
          virtual void a() { f("} // virtual void no(); \" {", '{', '\''); }
          virtual char b(char c = '}', const char* d = "/*");
          virtual void c() { g("*/"); }
        };"""
        self.assertEqual(names(source), ["a", "b", "c"])

    def test_macros_defined_in_the_body(self):
        source = """
        struct C {
          #define FAIL(func) \\
            virtual void no(); CHECK(false, "{", func);
          virtual void a() { FAIL(a); }
          # undef FAIL
          virtual void b();
        };"""
        self.assertEqual(names(source), ["a", "b"])

    def test_bodies_with_braces_and_nested_classes(self):
        source = """
        struct C {
          struct Inner { virtual void no(); struct Deeper { virtual void neither() {} }; } inner;
          enum class E { x, y };
          virtual void a() { if (x) { for (;;) { auto f = [&](int) { return a[b[0]]; }; } } }
          C() : x{1}, y(2) {}
          virtual void b() const noexcept(noexcept(f())) { }
          int array[2] = {1, 2};
          virtual void c();
        };"""
        self.assertEqual(names(source), ["a", "b", "c"])

    def test_default_arguments_and_types_with_brackets(self):
        source = """
        struct C {
          virtual std::function<void(int)> a(std::function<int(char)> f = [](char) { return 1; }, V v = {1, 2}) const;
          virtual const std::vector<std::pair<int, A<B>>>& b([[maybe_unused]] int x = f(1, (2))) const;
          virtual auto c(int (*callback)(int, int)) -> std::map<int, int>;
          [[deprecated("x(")]] virtual int d() volatile &;
          MACRO(1) virtual MACRO(2) int e() const;
          virtual ::at::Device f() const final;
          inline virtual unsigned long long g();
          virtual void h() try { } catch (...) { }
        };"""
        # `final` alone does not say that something is overridden, but without a base nothing can be.
        self.assertEqual([m.name for m in headers.parse(source, "C").methods], list("abcdefgh"))

    def test_a_declaration_ahead_a_friend_and_a_use_of_the_name(self):
        source = """
        struct C; class C; enum class Kind { C };
        struct B { friend struct C; C* c; virtual void no(C x); };
        template <typename T> struct D : B { virtual void neither(); };
        struct C { virtual void a(); };
        struct E : C { virtual void nor_this(); };"""
        self.assertEqual(names(source), ["a"])

    def test_a_derived_class_adds_its_own(self):
        base = headers.parse("struct B { virtual ~B() = default; virtual void a(); virtual void b(); };", "B")
        derived = headers.parse(
            "struct D : public at::B { ~D() override = default; virtual void b() override; void a() override; virtual void c(); virtual ~D(); };", "D"
        )
        self.assertEqual(headers.order(base, derived), ["~", "~delete", "a", "b", "c"])


class Refuses(unittest.TestCase):
    def refused(self, source: str, reason: str, name: str = "C"):
        with self.assertRaisesRegex(headers.HeaderError, reason):
            names(source, name)

    def test_what_is_not_there(self):
        self.refused("struct D {};", "no class C")
        self.refused("struct C;", "no class C")
        self.refused("", "no class C")

    def test_a_class_without_an_end(self):
        self.refused("struct C { virtual void a();", "no end")
        self.refused("struct C { virtual void a() { ", "no end")
        self.refused("struct C { virtual void a(int x] ); };", "do not match")

    def test_conditional_compilation(self):
        self.refused("struct C {\n#ifdef X\n virtual void a();\n#endif\n virtual void b(); };", "conditional")
        self.refused("struct C { virtual void a() {\n  #  if X\n }\n#endif\n };", "conditional")

    def test_several_or_virtual_bases(self):
        self.refused("struct C : A, B { };", "one plain class")
        self.refused("struct C : virtual A { };", "one plain class")
        self.refused("struct C : A<int> { };", "one plain class")

    def test_another_base_than_expected(self):
        base = headers.parse("struct B { virtual void a(); };", "B")
        with self.assertRaisesRegex(headers.HeaderError, "has the base X, not B"):
            headers.order(base, headers.parse("struct C : X { };", "C"))
        self.refused("struct C : B { virtual void a(); };", "has the base B, not None")

    def test_operators_and_methods_without_a_name(self):
        self.refused("struct C { virtual bool operator<(const C&); };", "operator")
        self.refused("struct C { virtual int x; };", "without a name")

    def test_a_method_that_may_be_an_override_or_an_overload(self):
        base = headers.parse("struct B { virtual void a(int); };", "B")
        with self.assertRaisesRegex(headers.HeaderError, "does not say which"):
            headers.order(base, headers.parse("struct C : B { virtual void a(char); };", "C"))
        with self.assertRaisesRegex(headers.HeaderError, "does not have"):
            headers.order(base, headers.parse("struct C : B { virtual void b() override; };", "C"))

    def test_any_text_ends_in_an_order_or_a_refusal(self):
        pieces = ["struct C {", "virtual", "void", "a", "(", ")", "{", "}", ";", "<", "[[", "]]", "[", "]", "\"", "'", "/*", "\n#if X\n", "~C", "\\"]
        for length in (3, 4):
            for chosen in itertools.islice(itertools.product(pieces, repeat=length), 0, None, 7):
                source = "struct C { " + " ".join(chosen)
                try:
                    self.assertIsInstance(names(source), list)
                except headers.HeaderError:
                    pass


if __name__ == "__main__":
    unittest.main()
