// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs: inputs borrowed from the caller's memory, outputs owned by ONNX Runtime until they are dropped.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;

use lighter_frames::{Element, Tensor};
use ort_sys::{ONNXTensorElementDataType, OrtRunOptions, OrtTensorTypeAndShapeInfo, OrtValue};

use super::library::made;
use super::{Ort, OrtError, Session};

/// An input of a run.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    tensor: &'a Tensor,
    data: *const u8,
    bytes: PhantomData<&'a [u8]>,
}

impl<'a> Input<'a> {
    /// A tensor whose data are exactly `data`; `None` when they have another length.
    #[must_use]
    pub fn new(tensor: &'a Tensor, data: &'a [u8]) -> Option<Self> {
        let fits = u64::try_from(data.len()).is_ok_and(|len| len == tensor.bytes());
        fits.then_some(Self { tensor, data: data.as_ptr(), bytes: PhantomData })
    }

    /// A tensor whose data somebody else may change while they are read.
    ///
    /// # Safety
    /// `data` is readable for [`Tensor::bytes`] bytes for as long as `'a`. The element type is one that an engine
    /// only computes with: what it checks before use, such as an index, must be in memory that nobody else writes.
    #[must_use]
    pub unsafe fn shared(tensor: &'a Tensor, data: *const u8) -> Self {
        Self { tensor, data, bytes: PhantomData }
    }
}

const fn number_of(element: Element) -> ONNXTensorElementDataType {
    match element {
        Element::F32 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        Element::U8 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
        Element::I8 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,
        Element::U16 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16,
        Element::I16 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16,
        Element::I32 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
        Element::I64 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
        Element::Bool => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL,
        Element::F16 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
        Element::F64 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE,
        Element::U32 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32,
        Element::U64 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64,
        Element::Bf16 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16,
    }
}

/// ONNX's word for a type that does not travel.
fn word_of(number: i32) -> String {
    match number {
        0 => "of no type".to_owned(),
        8 => "a tensor of texts".to_owned(),
        14 | 15 => "a tensor of complex numbers".to_owned(),
        17..=20 | 23 | 26 => "a tensor of floats of 8 bits or less".to_owned(),
        21 | 22 | 24 | 25 => "a tensor of integers of 4 bits or less".to_owned(),
        other => format!("a tensor of ONNX's type {other}"),
    }
}

/// A value that is released in the end.
#[derive(Debug)]
struct Value {
    ort: Arc<Ort>,
    value: NonNull<OrtValue>,
}

// SAFETY: a value may be used and released by any thread.
unsafe impl Send for Value {}

impl Drop for Value {
    fn drop(&mut self) {
        // SAFETY: given to us by ONNX Runtime, and released once.
        unsafe { (self.ort.api.ReleaseValue)(self.value.as_ptr()) }
    }
}

/// Ends the runs that it was given to, from any thread and for good.
#[derive(Debug)]
pub struct Stop {
    ort: Arc<Ort>,
    options: NonNull<OrtRunOptions>,
}

// SAFETY: options of runs may be used and released by any thread.
unsafe impl Send for Stop {}
// SAFETY: ONNX Runtime documents that one thread may set the flag while another runs.
unsafe impl Sync for Stop {}

impl Drop for Stop {
    fn drop(&mut self) {
        // SAFETY: made by CreateRunOptions, and released once.
        unsafe { (self.ort.api.ReleaseRunOptions)(self.options.as_ptr()) }
    }
}

impl Stop {
    /// A new one.
    ///
    /// # Errors
    /// When ONNX Runtime has no memory for it.
    pub fn new(ort: &Arc<Ort>) -> Result<Self, OrtError> {
        let what = "options of a run";
        let mut options = null_mut();
        // SAFETY: the place for the result is ours.
        ort.check(what, unsafe { (ort.api.CreateRunOptions)(&raw mut options) })?;
        Ok(Self { ort: Arc::clone(ort), options: made(what, options)? })
    }

    /// Ends them: before its next operation each fails.
    pub fn stop(&self) {
        // SAFETY: the options are alive.
        let status = unsafe { (self.ort.api.RunOptionsSetTerminate)(self.options.as_ptr()) };
        if let Err(error) = self.ort.check("the end of a run", status) {
            tracing::warn!(%error, "a run could not be ended");
        }
    }
}

/// An output of a run.
#[derive(Debug)]
pub struct Output {
    tensor: Tensor,
    value: Value,
}

impl Output {
    /// Its type and dimensions.
    #[must_use]
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Its data.
    ///
    /// # Errors
    /// When ONNX Runtime does not give them.
    pub fn data(&self) -> Result<&[u8], OrtError> {
        let what = "data of an output";
        let length = usize::try_from(self.tensor.bytes()).unwrap_or(0);
        if length == 0 {
            return Ok(&[]);
        }
        let mut data = null_mut();
        let ort = &self.value.ort;
        // SAFETY: the value is alive, and the place for the result is ours.
        ort.check(what, unsafe { (ort.api.GetTensorMutableData)(self.value.value.as_ptr(), &raw mut data) })?;
        let data = made(what, data.cast::<u8>())?;
        // SAFETY: a tensor on the processor of this type and these dimensions holds that many bytes, which live and
        // do not change until the value is released.
        Ok(unsafe { std::slice::from_raw_parts(data.as_ptr(), length) })
    }
}

impl Session {
    /// Runs the model: the inputs in the order of its ports, all outputs back in the order of theirs.
    ///
    /// # Errors
    /// When the number of inputs is another, ONNX Runtime refuses or fails, the run is stopped, or an output does not
    /// travel.
    pub fn run(&self, inputs: &[Input<'_>], stop: Option<&Stop>) -> Result<Vec<Output>, OrtError> {
        if inputs.len() != self.inputs.len() {
            return Err(OrtError::Count { given: inputs.len(), wanted: self.inputs.len() });
        }
        let api = self.ort.api;
        let values =
            inputs.iter().map(|input| self.value_of(input)).collect::<Result<Vec<Value>, OrtError>>()?;
        let input_names: Vec<_> = self.inputs.iter().map(|name| name.as_ptr()).collect();
        let input_values: Vec<_> = values.iter().map(|value| value.value.as_ptr().cast_const()).collect();
        let output_names: Vec<_> = self.outputs.iter().map(|name| name.as_ptr()).collect();
        let mut results = vec![null_mut(); output_names.len()];
        // SAFETY: session, options, names and values are alive; the arrays are as long as is said; results that are null ask
        // ONNX Runtime to make them. Input data are only read, and live until this returns.
        let status = unsafe {
            (api.Run)(
                self.session.as_ptr(),
                stop.map_or_else(null, |stop| stop.options.as_ptr().cast_const()),
                input_names.as_ptr(),
                input_values.as_ptr(),
                input_values.len(),
                output_names.as_ptr(),
                output_names.len(),
                results.as_mut_ptr(),
            )
        };
        // First of all they must be released, also when there is an error.
        let owned: Vec<Option<Value>> = results
            .into_iter()
            .map(|value| NonNull::new(value).map(|value| Value { ort: Arc::clone(&self.ort), value }))
            .collect();
        self.ort.check("the run failed", status)?;
        owned.into_iter().enumerate().map(|(index, value)| self.output_of(index, value)).collect()
    }

    fn value_of(&self, input: &Input<'_>) -> Result<Value, OrtError> {
        // Every dimension is far below the sign.
        let dims: Vec<i64> = input.tensor.dims().iter().map(|dim| dim.cast_signed()).collect();
        let mut value = null_mut();
        let length = usize::try_from(input.tensor.bytes()).unwrap_or(0);
        // SAFETY: memory info and dimensions are alive, the data are readable for `length` bytes until the run is
        // over, which is longer than the value lives. The pointer is mutable in C's table only.
        let status = unsafe {
            (self.ort.api.CreateTensorWithDataAsOrtValue)(
                self.ort.memory.as_ptr(),
                input.data.cast_mut().cast(),
                length,
                dims.as_ptr(),
                dims.len(),
                number_of(input.tensor.element()),
                &raw mut value,
            )
        };
        let what = "an input cannot be given";
        self.ort.check(what, status)?;
        Ok(Value { ort: Arc::clone(&self.ort), value: made(what, value)? })
    }

    fn output_of(&self, index: usize, value: Option<Value>) -> Result<Output, OrtError> {
        let name = || self.outputs.get(index).map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        let none = || OrtError::Element { name: name(), what: "missing".to_owned() };
        let value = value.ok_or_else(none)?;
        let (api, what) = (self.ort.api, "shape of an output");
        let mut is_tensor = 0;
        // SAFETY: the value is alive, and the place for the result is ours.
        self.ort.check(what, unsafe { (api.IsTensor)(value.value.as_ptr(), &raw mut is_tensor) })?;
        if is_tensor == 0 {
            return Err(OrtError::Element { name: name(), what: "no tensor".to_owned() });
        }
        let mut info = null_mut();
        // SAFETY: as above.
        self.ort.check(what, unsafe { (api.GetTensorTypeAndShape)(value.value.as_ptr(), &raw mut info) })?;
        let info = made(what, info)?;
        let read = self.read_shape(info);
        // SAFETY: given to us above, and released once.
        unsafe { (api.ReleaseTensorTypeAndShapeInfo)(info.as_ptr()) }
        let (number, dims) = read?;
        let element = Element::from_number(number);
        let element = element.ok_or_else(|| OrtError::Element { name: name(), what: word_of(number) })?;
        let tensor = Tensor::new(element, dims);
        let tensor = tensor.map_err(|source| OrtError::Shape { name: name(), source })?;
        Ok(Output { tensor, value })
    }

    fn read_shape(&self, info: NonNull<OrtTensorTypeAndShapeInfo>) -> Result<(i32, Vec<u64>), OrtError> {
        let (api, what) = (self.ort.api, "shape of an output");
        let (mut number, mut rank) = (0_i32, 0);
        // SAFETY: the info is alive. The type is read as the number that it is in C, because a newer library may
        // have types that the enumeration does not know.
        self.ort.check(what, unsafe {
            let number = (&raw mut number).cast::<ONNXTensorElementDataType>();
            (api.GetTensorElementType)(info.as_ptr(), number)
        })?;
        // SAFETY: the info is alive, and the place for the result is ours.
        self.ort.check(what, unsafe { (api.GetDimensionsCount)(info.as_ptr(), &raw mut rank) })?;
        let mut dims = vec![0_i64; rank];
        // SAFETY: as above, with room for `rank` numbers.
        self.ort.check(what, unsafe { (api.GetDimensions)(info.as_ptr(), dims.as_mut_ptr(), rank) })?;
        // A value that exists has no negative dimension; were there one, the cap refuses what it becomes.
        Ok((number, dims.into_iter().map(i64::cast_unsigned).collect()))
    }
}
