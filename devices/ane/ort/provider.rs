// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which provider a session uses and with which options. Pure; [`super::session`] performs it.

use std::collections::BTreeMap;
use std::path::Path;

use crate::ane::control::Provider;

/// A provider and its options, all from the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProviderSetup {
    /// The provider.
    pub provider: Provider,
    /// Its options by its own keys.
    pub options: BTreeMap<String, String>,
}

/// How ONNX Runtime is told of a provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    /// It is there unasked.
    None,
    /// By this name.
    Named(&'static str),
    /// CUDA's own functions.
    Cuda,
    /// TensorRT's own functions.
    TensorRt,
}

impl Provider {
    /// ONNX Runtime's name in its list of providers.
    #[must_use]
    pub const fn ort_name(self) -> &'static str {
        match self {
            Self::Cpu => "CPUExecutionProvider",
            Self::OpenVino => "OpenVINOExecutionProvider",
            Self::Cuda => "CUDAExecutionProvider",
            Self::TensorRt => "TensorrtExecutionProvider",
            Self::MiGraphX => "MIGraphXExecutionProvider",
            Self::CoreMl => "CoreMLExecutionProvider",
        }
    }

    pub(super) const fn entry(self) -> Entry {
        match self {
            Self::Cpu => Entry::None,
            Self::OpenVino => Entry::Named("OpenVINO"),
            Self::MiGraphX => Entry::Named("MIGraphX"),
            Self::CoreMl => Entry::Named("CoreML"),
            Self::Cuda => Entry::Cuda,
            Self::TensorRt => Entry::TensorRt,
        }
    }

    /// What the provider needs in every case, unless the host's configuration says otherwise.
    fn defaults(self, threads: u16, cache_dir: Option<&Path>) -> Vec<(&'static str, String)> {
        let cache = cache_dir.map(|dir| dir.to_string_lossy().into_owned());
        match self {
            Self::Cpu | Self::MiGraphX => Vec::new(),
            // A model's 32-bit floats are computed as such, not cut to 19 bits.
            Self::Cuda => vec![("use_tf32", "0".to_owned())],
            // A GPU's own default is half precision, whatever the model's is.
            Self::OpenVino => {
                let mut options = vec![
                    ("device_type", "CPU".to_owned()),
                    ("num_of_threads", threads.to_string()),
                    ("precision", "ACCURACY".to_owned()),
                ];
                options.extend(cache.map(|dir| ("cache_dir", dir)));
                options
            }
            Self::TensorRt => match cache {
                None => Vec::new(),
                Some(dir) => {
                    vec![("trt_engine_cache_enable", "1".to_owned()), ("trt_engine_cache_path", dir)]
                }
            },
            // The newer format carries half precision and more operations; fixed shapes are what the Neural Engine
            // takes.
            Self::CoreMl => {
                let mut options = vec![
                    ("ModelFormat", "MLProgram".to_owned()),
                    ("MLComputeUnits", "ALL".to_owned()),
                    ("RequireStaticInputShapes", "1".to_owned()),
                ];
                options.extend(cache.map(|dir| ("ModelCacheDirectory", dir)));
                options
            }
        }
    }
}

impl ProviderSetup {
    /// All options of a session: the defaults, and the host's over them.
    pub(super) fn merged(&self, threads: u16, cache_dir: Option<&Path>) -> BTreeMap<String, String> {
        let defaults = self.provider.defaults(threads, cache_dir);
        let mut merged: BTreeMap<String, String> =
            defaults.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        merged.extend(self.options.clone());
        merged
    }

    /// Keys of the model's metadata under which the provider looks for the name of what it compiled. Without one,
    /// CoreML takes models with the same port names for the same model.
    #[must_use]
    pub const fn cache_keys(&self) -> &'static [&'static str] {
        match self.provider {
            Provider::CoreMl => &["COREML_CACHE_KEY", "CACHE_KEY"],
            _ => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_options_win_over_the_defaults() {
        let options = BTreeMap::from([("device_type".to_owned(), "GPU".to_owned())]);
        let setup = ProviderSetup { provider: Provider::OpenVino, options };
        let merged = setup.merged(2, Some(Path::new("/cache")));
        assert_eq!(merged["device_type"], "GPU");
        assert_eq!(merged["num_of_threads"], "2");
        assert_eq!(merged["cache_dir"], "/cache");
    }

    #[test]
    fn only_coreml_needs_a_name_for_its_cache() {
        let setup = |provider| ProviderSetup { provider, options: BTreeMap::new() };
        assert!(setup(Provider::Cpu).cache_keys().is_empty());
        assert_eq!(setup(Provider::CoreMl).cache_keys().len(), 2);
        assert_eq!(setup(Provider::CoreMl).merged(1, None)["RequireStaticInputShapes"], "1");
    }
}
