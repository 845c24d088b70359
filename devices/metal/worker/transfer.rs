// SPDX-License-Identifier: MIT OR Apache-2.0
//! Moving content between a client and its tensors, and the small questions.
//!
//! On a device with plain memory bytes go from the socket to where they belong and back without a copy between.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;

use super::client::{Client, ClientError, PIECE_BYTES};
use super::rules::{Node, check};
use super::shape::Shape;
use super::space::Access;
use super::weights::{MIN_BYTES, Upload, find};
use crate::metal::ggml::{Builder, NodeSpec, Place};
use crate::metal::rpc::{
    AllocSize, Command, CopyPair, Hash, MAX_SOURCES, Memset, Op, ReadRegion, ReadRows, Rows, WireTensor,
    WriteRegion, WriteRows, alloc_buffer, clear_buffer, device_of, handle_of,
};

/// ggml's flags of tensors that a graph is fed with or gives back: not weights.
const FED: i32 = 3;

impl Client {
    /// The commands whose bodies are a few numbers.
    pub(super) fn small(&mut self, command: Command, body: &[u8]) -> Result<(), ClientError> {
        let malformed = || ClientError::Body(command);
        match command {
            Command::DeviceCount => self.answer(&1_u32.to_le_bytes()),
            Command::GetAlignment | Command::GetMaxSize | Command::GetDeviceMemory => {
                self.only_device(device_of(body, self.major).ok_or_else(malformed)?)?;
                self.device_facts(command)
            }
            Command::AllocBuffer => {
                let (device, len) = alloc_buffer(body, self.major).ok_or_else(malformed)?;
                self.only_device(device)?;
                let handle = self.space.allocate(len);
                let mut answer = handle.unwrap_or(0).to_le_bytes().to_vec();
                answer.extend(handle.map_or(0, |_| len).to_le_bytes());
                self.answer(&answer)
            }
            Command::BufferGetBase => {
                let base = self.space.base(handle_of(body).ok_or_else(malformed)?)?;
                self.answer(&base.to_le_bytes())
            }
            Command::FreeBuffer => {
                let handle = handle_of(body).ok_or_else(malformed)?;
                self.settle();
                let memories = self.space.free(handle)?;
                self.drop_graphs_of(&memories);
                self.acknowledge()
            }
            Command::BufferClear => {
                let (handle, value) = clear_buffer(body).ok_or_else(malformed)?;
                self.settle();
                self.space.clear(handle, value)?;
                self.drop_stale();
                self.acknowledge()
            }
            // Joining servers would have this one connect to where the client says; a client that is told no goes
            // on without, and never sends what builds on it.
            Command::CommInit => self.answer(&[0]),
            Command::CommFree => Ok(()),
            _ => Err(malformed()),
        }
    }

    fn device_facts(&mut self, command: Command) -> Result<(), ClientError> {
        match command {
            Command::GetAlignment => self.answer(&self.engine.alignment.to_le_bytes()),
            Command::GetMaxSize => self.answer(&self.engine.max_buffer_bytes.to_le_bytes()),
            _ => {
                let (free, total) = self.engine.memory();
                let mut answer = free.to_le_bytes().to_vec();
                answer.extend(total.to_le_bytes());
                self.answer(&answer)
            }
        }
    }

    fn shape(&self, tensor: &WireTensor) -> Result<Shape, ClientError> {
        Ok(Shape::new(&self.engine.ggml, tensor.kind, tensor.ne, tensor.nb)?)
    }

    /// The memory of a region of a tensor.
    fn region(
        &mut self,
        tensor: &WireTensor,
        offset: u64,
        bytes: u64,
        access: Access,
    ) -> Result<Place, ClientError> {
        let len = self.shape(tensor)?.bytes;
        let outside = ClientError::Region { offset, bytes, len };
        if offset.checked_add(bytes).is_none_or(|end| end > len) {
            return Err(outside);
        }
        self.settle();
        let address = tensor.data.checked_add(offset).ok_or(outside)?;
        let place = self.space.place(tensor.buffer, address, bytes, access)?;
        self.drop_stale();
        Ok(place)
    }

    /// Reads bytes of the client's stream into a place.
    fn take_into(&mut self, place: &Place) -> Result<(), ClientError> {
        if place.memory.is_host() {
            let reader = &mut self.reader;
            let read = place.memory.write(place.offset, place.bytes, |target| reader.read_into(target))?;
            return read.map_err(ClientError::Stream);
        }
        let mut done = 0;
        while done < place.bytes {
            let piece = (place.bytes - done).min(PIECE_BYTES as u64);
            let body = self.read_body(piece)?;
            place.memory.put(place.offset + done, &body)?;
            self.body = body;
            done += piece;
        }
        Ok(())
    }

    /// Sends the bytes of a place as an answer.
    fn give(&mut self, place: &Place) -> Result<(), ClientError> {
        if place.memory.is_host() {
            return place.memory.read(place.offset, place.bytes, |bytes| self.answer(bytes))?;
        }
        let mut sent = self.send(&place.bytes.to_le_bytes())?;
        let mut done = 0;
        while done < place.bytes {
            let piece = (place.bytes - done).min(PIECE_BYTES as u64);
            let mut body = std::mem::take(&mut self.body);
            body.resize(usize::try_from(piece).unwrap_or(0), 0);
            place.memory.get(place.offset + done, &mut body)?;
            sent += self.send(&body)?;
            self.body = body;
            done += piece;
        }
        self.engine.counters.out_bytes.fetch_add(sent, Relaxed);
        Ok(())
    }

    fn send(&self, mut bytes: &[u8]) -> Result<u64, ClientError> {
        let total = bytes.len() as u64;
        while !bytes.is_empty() {
            let flags = rustix::net::SendFlags::NOSIGNAL;
            match rustix::net::send(self.reader.source().as_fd(), bytes, flags) {
                Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(ClientError::Stream(errno.into())),
            }
        }
        Ok(total)
    }

    pub(super) fn set_tensor(&mut self, body_bytes: u64) -> Result<(), ClientError> {
        let mut head = [0; 320];
        let head_bytes = WriteRegion::head_bytes(self.major);
        let head = head.get_mut(..head_bytes).ok_or(ClientError::Body(Command::SetTensor))?;
        self.reader.read_into(head).map_err(ClientError::Stream)?;
        let region = WriteRegion::parse(head, self.major).ok_or(ClientError::Body(Command::SetTensor))?;
        let bytes = body_bytes - head_bytes as u64;
        let WriteRegion { tensor, offset, .. } = region;
        if self.is_weight(&tensor, offset, bytes)? {
            return self.take_weight(&tensor, bytes);
        }
        let place = self.region(&tensor, offset, bytes, Access::Write)?;
        self.take_into(&place)
    }

    /// Whether an upload is a whole weight that may be shared.
    /// What the client says about keeping does not decide: it only ever asks for its largest.
    fn is_weight(&mut self, tensor: &WireTensor, offset: u64, bytes: u64) -> Result<bool, ClientError> {
        if !self.engine.config.share_weights
            || bytes < MIN_BYTES
            || offset != 0
            || tensor.op != 0
            || tensor.view_src != 0
            || tensor.flags & FED != 0
        {
            return Ok(false);
        }
        let whole = self.shape(tensor)?.bytes == bytes;
        Ok(whole && self.space.may_share(tensor.buffer, tensor.data, bytes)?)
    }

    fn take_weight(&mut self, tensor: &WireTensor, bytes: u64) -> Result<(), ClientError> {
        let upload = Upload::receive(&self.engine, &mut self.reader, bytes)?;
        match upload.shared(&self.engine, &self.link) {
            Some(memory) => self.space.share(tensor.buffer, tensor.data, memory)?,
            None => {
                let place = self.region(tensor, 0, bytes, Access::Write)?;
                upload.copy_to(&place.memory, place.offset)?;
            }
        }
        self.drop_stale();
        Ok(())
    }

    pub(super) fn find_tensor(&mut self, body: &[u8]) -> Result<(), ClientError> {
        let Hash { tensor, offset, fnv } =
            Hash::parse(body).ok_or(ClientError::Body(Command::SetTensorHash))?;
        let bytes = self.shape(&tensor)?.bytes;
        self.settle();
        let found = self.is_weight(&tensor, offset, bytes)?
            && match find(&self.engine, &self.link, bytes, fnv) {
                Some(memory) => {
                    self.space.share(tensor.buffer, tensor.data, memory)?;
                    self.drop_stale();
                    true
                }
                None => false,
            };
        self.answer(&[u8::from(found)])
    }

    pub(super) fn get_tensor(&mut self, body: &[u8]) -> Result<(), ClientError> {
        let ReadRegion { tensor, offset, bytes } =
            ReadRegion::parse(body).ok_or(ClientError::Body(Command::GetTensor))?;
        let place = self.region(&tensor, offset, bytes, Access::Read)?;
        self.give(&place)
    }

    pub(super) fn fill_tensor(&mut self, body: &[u8]) -> Result<(), ClientError> {
        let Memset { region, value } = Memset::parse(body).ok_or(ClientError::Body(Command::MemsetTensor))?;
        let place = self.region(&region.tensor, region.offset, region.bytes, Access::Write)?;
        place.memory.fill(place.offset, place.bytes, value)?;
        self.acknowledge()
    }

    /// Copies within the server where both tensors are laid out alike; else the client does it through itself.
    pub(super) fn copy_tensor(&mut self, body: &[u8]) -> Result<(), ClientError> {
        let CopyPair { from, to } = CopyPair::parse(body).ok_or(ClientError::Body(Command::CopyTensor))?;
        let (source, target) = (self.shape(&from)?, self.shape(&to)?);
        let alike = source == target && source.contiguous();
        if alike {
            let bytes = source.bytes;
            let to = self.region(&to, 0, bytes, Access::Write)?;
            let from = self.region(&from, 0, bytes, Access::Read)?;
            to.memory.copy_from(to.offset, &from.memory, from.offset, bytes)?;
        }
        self.answer(&[u8::from(alike)])
    }

    /// The memory from the first to the last of equal rows.
    fn rows(&mut self, tensor: &WireTensor, rows: &Rows, access: Access) -> Result<Place, ClientError> {
        let Rows { offset, row_bytes, .. } = *rows;
        let len = self.shape(tensor)?.bytes;
        let outside = ClientError::Region { offset, bytes: row_bytes, len };
        let end = rows.end().ok_or(outside)?;
        self.region(tensor, offset, end - offset, access)
    }

    pub(super) fn set_rows(&mut self, body_bytes: u64) -> Result<(), ClientError> {
        let malformed = || ClientError::Body(Command::SetTensor2d);
        let mut head = [0; WriteRows::HEAD_BYTES];
        self.reader.read_into(&mut head).map_err(ClientError::Stream)?;
        let WriteRows { tensor, rows } = WriteRows::parse(&head).ok_or_else(malformed)?;
        if rows.total_bytes() != Some(body_bytes - head.len() as u64) {
            return Err(malformed());
        }
        let place = self.rows(&tensor, &rows, Access::Write)?;
        for row in 0..rows.rows {
            let offset = place.offset + row * rows.stride;
            self.take_into(&Place { offset, bytes: rows.row_bytes, ..place.clone() })?;
        }
        Ok(())
    }

    pub(super) fn get_rows(&mut self, body: &[u8]) -> Result<(), ClientError> {
        let malformed = || ClientError::Body(Command::GetTensor2d);
        let ReadRows { tensor, rows } = ReadRows::parse(body).ok_or_else(malformed)?;
        let total = rows.total_bytes().ok_or_else(malformed)?;
        let place = self.rows(&tensor, &rows, Access::Read)?;
        // Rows that overlap could ask for more than there is memory.
        if total > place.bytes {
            return Err(malformed());
        }
        self.engine.counters.out_bytes.fetch_add(self.send(&total.to_le_bytes())? + total, Relaxed);
        let mut row_bytes = vec![0; usize::try_from(rows.row_bytes).unwrap_or(0)];
        for row in 0..rows.rows {
            place.memory.get(place.offset + row * rows.stride, &mut row_bytes)?;
            self.send(&row_bytes)?;
        }
        Ok(())
    }

    fn lone_spec(tensor: &WireTensor, place: Option<Place>) -> NodeSpec {
        NodeSpec {
            kind: i32::try_from(tensor.kind).unwrap_or(-1),
            ne: tensor.ne,
            nb: tensor.nb,
            op: 0,
            params: tensor.params,
            flags: 0,
            name: tensor.name,
            place,
        }
    }

    /// Bytes that a tensor takes on the device; on the host, its own.
    fn device_bytes(&self, tensor: &WireTensor) -> Result<u64, ClientError> {
        let own = self.shape(tensor)?.bytes;
        if self.engine.host {
            return Ok(own);
        }
        let mut builder = Builder::new(&self.engine.ggml, 1, 0)?;
        builder.add(&Self::lone_spec(tensor, None))?;
        Ok(builder.device_bytes(&self.engine.device, 0)?.unwrap_or(own).max(own))
    }

    pub(super) fn init_tensor(&mut self, body: &[u8]) -> Result<(), ClientError> {
        let (tensor, _) = WireTensor::split(body).ok_or(ClientError::Body(Command::InitTensor))?;
        let bytes = self.device_bytes(&tensor)?;
        if !self.engine.host && tensor.buffer != 0 {
            self.settle();
            // All that the device may touch lies within the buffer, padding behind the tensor too.
            let place = self.space.place(tensor.buffer, tensor.data, bytes, Access::Write)?;
            let mut builder = Builder::new(&self.engine.ggml, 1, 0)?;
            builder.add(&Self::lone_spec(&tensor, Some(place)))?;
            if !builder.prepare(0)? {
                return Err(ClientError::Notes);
            }
        }
        self.acknowledge()
    }

    pub(super) fn alloc_size(&mut self, body: &[u8]) -> Result<(), ClientError> {
        let asked = AllocSize::parse(body, self.major).ok_or(ClientError::Body(Command::GetAllocSize))?;
        self.only_device(asked.device)?;
        let bytes = match self.computed_bytes(&asked)? {
            Some(bytes) => bytes,
            None => self.device_bytes(&asked.tensor)?,
        };
        self.answer(&bytes.to_le_bytes())
    }

    /// Bytes that a tensor takes as the result of its operation: some devices keep notes behind it. `None` where
    /// the operation does not matter or is none that would be computed.
    fn computed_bytes(&self, asked: &AllocSize) -> Result<Option<u64>, ClientError> {
        let op = self.age().and_then(|era| era.op(asked.tensor.op)).unwrap_or(Op::None);
        let number = self.engine.ggml.op_number(op);
        let (false, false, Some(number)) = (self.engine.host, matches!(op, Op::None), number) else {
            return Ok(None);
        };
        let out = self.shape(&asked.tensor)?;
        let mut shapes = [None; MAX_SOURCES];
        for (shape, source) in shapes.iter_mut().zip(&asked.sources) {
            *shape = source.as_ref().map(|source| self.shape(source)).transpose()?;
        }
        let src = std::array::from_fn(|slot| shapes.get(slot).and_then(Option::as_ref));
        let node = Node { op, unary: None, out: &out, src, params: &asked.tensor.params };
        if check(&node).is_err() {
            return Ok(None);
        }
        let mut builder = Builder::new(&self.engine.ggml, 1 + MAX_SOURCES, 1)?;
        builder.add(&NodeSpec { op: number, ..Self::lone_spec(&asked.tensor, None) })?;
        let there =
            asked.sources.iter().enumerate().filter_map(|(slot, source)| Some((slot, source.as_ref()?)));
        for (at, (slot, source)) in (1..).zip(there) {
            builder.add(&Self::lone_spec(source, None))?;
            builder.link(0, slot, at)?;
        }
        Ok(builder.device_bytes(&self.engine.device, 0)?.map(|bytes| bytes.max(out.bytes)))
    }
}
