# SPDX-License-Identifier: MIT OR Apache-2.0
"""Makes unmodified programs use the ane device: onnxruntime's sessions get the provider LighterANE first.

Only sessions that name no provider, or the processor's alone, and whose options hold none; a program that chooses is left
alone. What does not work (no device in this container, an onnxruntime before 1.24) is said in one line on standard error,
and the program runs as it would without. Called by sitecustomize.py, or by hand: lighter_ane_auto.install().
"""

import functools
import importlib.util
import os
import sys
import threading
import weakref

LIBRARY = "/usr/lib/lighter/ane/liblighter_ane_ep.so"
PROVIDER = "LighterANE"
# What onnxruntime has without any device; its own list of available providers names both.
PLAIN = {"CPUExecutionProvider", "AzureExecutionProvider"}


def say(text):
    sys.stderr.write("lighter-ane: " + text.replace("\n", " ") + "\n")


def library():
    return os.environ.get("LIGHTER_ANE_EP") or LIBRARY


class _Devices:
    """The provider's devices, which are looked for once."""

    def __init__(self):
        self.lock, self.found = threading.Lock(), None

    def get(self, onnxruntime):
        with self.lock:
            if self.found is None:
                try:
                    self.found = self.register(onnxruntime)
                except Exception as error:
                    self.found = []
                    say("onnxruntime %s runs without the device: %s" % (onnxruntime.__version__, error))
        return self.found

    @staticmethod
    def register(onnxruntime):
        path = library()
        if not os.path.exists(path):
            raise RuntimeError(path + " is not there: start the container with --device lighter.sh/ane=all")
        if not hasattr(onnxruntime, "register_execution_provider_library"):
            raise RuntimeError("LighterANE needs ONNX Runtime 1.24 or newer; install a newer onnxruntime in the container")
        known = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]
        if not known:
            onnxruntime.register_execution_provider_library("lighter-ane", path)
        return [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]


def _is_plain(providers):
    names = {provider if isinstance(provider, str) else provider[0] for provider in providers or []}
    return names <= PLAIN


def _wrap(onnxruntime):
    session, devices = onnxruntime.InferenceSession, _Devices()
    plain_init = session.__init__
    # Options that a program uses for several sessions have the provider from the first on.
    ours = weakref.WeakSet()

    @functools.wraps(plain_init)
    def init(self, path_or_bytes, sess_options=None, providers=None, provider_options=None, **kwargs):
        asked = (path_or_bytes, sess_options, providers, provider_options)
        is_free = sess_options is None or sess_options in ours or not sess_options.has_providers()
        found = devices.get(onnxruntime) if is_free and _is_plain(providers) else []
        if not found:
            return plain_init(self, *asked, **kwargs)
        options = sess_options if sess_options is not None else onnxruntime.SessionOptions()
        if options not in ours:
            options.add_provider_for_devices(found, {})
            ours.add(options)
        return plain_init(self, path_or_bytes, options, None, None, **kwargs)

    session.__init__ = init


class _Finder:
    """Waits for onnxruntime to be imported; finds nothing itself."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "onnxruntime":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            plain_exec = spec.loader.exec_module

            def exec_module(module):
                plain_exec(module)
                try:
                    _wrap(module)
                except Exception as error:
                    say("this onnxruntime runs without the device: %s" % error)

            spec.loader.exec_module = exec_module
        return spec


def install():
    """Prepares for onnxruntime, which may be imported later or never."""
    if "onnxruntime" in sys.modules:
        _wrap(sys.modules["onnxruntime"])
    elif _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
