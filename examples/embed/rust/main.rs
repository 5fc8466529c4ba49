// SPDX-License-Identifier: Apache-2.0
//
// Trains, evaluates, exports and resumes a small language model from Rust. Build and run:
//
//   LIB=$(python3 -c "import mojolearn, os; print(os.path.dirname(mojolearn.__file__))")/_lib
//   rustc -O -L "$LIB" -C link-arg=-Wl,-rpath,"$LIB" main.rs
//   ./main
//
// The last line is a digest of the trained state and of all losses. ../c/train.c and the Python package print the same.

use std::ffi::{c_void, CStr};
use std::mem::size_of;
use std::os::raw::c_char;
use std::ptr;

/// The part of mojolearn.h that this program uses.
mod ffi {
    use super::*;

    pub const ABI_VERSION: u32 = 1;

    #[repr(C)]
    pub struct Session {
        _private: [u8; 0],
    }

    #[repr(C)]
    pub struct Shape {
        pub struct_size: u32,
        pub batch: i32,
        pub length: i32,
        pub d_model: i32,
        pub n_heads: i32,
        pub n_kv: i32,
        pub head_dim: i32,
        pub intermediate: i32,
        pub n_layers: i32,
        pub vocab_size: i32,
        pub chunked_lm_head_v2: i32,
    }

    #[repr(C)]
    pub struct AdamW {
        pub struct_size: u32,
        pub lr: f32,
        pub beta1: f32,
        pub beta2: f32,
        pub eps: f32,
        pub weight_decay: f32,
    }

    #[repr(C)]
    pub struct State {
        pub struct_size: u32,
        pub reserved: u32,
        pub parameters: *const f32,
        pub m: *const f32,
        pub v: *const f32,
        pub count: u64,
        pub completed_steps: i64,
    }

    #[repr(C)]
    pub struct StepResult {
        pub struct_size: u32,
        pub loss: f32,
        pub completed_steps: i64,
    }

    #[link(name = "mojolearn")]
    extern "C" {
        pub fn mjl_abi_version() -> u32;
        pub fn mjl_last_error() -> *const c_char;
        pub fn mjl_session_open(
            options: *const c_void,
            shape: *const Shape,
            adamw: *const AdamW,
            state: *const State,
            out_session: *mut *mut Session,
        ) -> i32;
        pub fn mjl_session_step(
            session: *mut Session,
            ids: *const i32,
            ids_count: u64,
            out_result: *mut StepResult,
        ) -> i32;
        pub fn mjl_session_evaluate(session: *mut Session, ids: *const i32, ids_count: u64, out_loss: *mut f32) -> i32;
        pub fn mjl_session_export_state(
            session: *mut Session,
            out_parameters: *mut f32,
            out_m: *mut f32,
            out_v: *mut f32,
            count: u64,
            out_completed_steps: *mut i64,
        ) -> i32;
        pub fn mjl_session_close(session: *mut Session);
    }
}

type Result<T> = std::result::Result<T, String>;

fn check(status: i32) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the text is valid until this thread's next call of the library.
    let text = unsafe { CStr::from_ptr(ffi::mjl_last_error()) };
    Err(format!("{} (status {status})", text.to_string_lossy()))
}

/// A model's state in memory of our own.
#[derive(Clone)]
struct State {
    parameters: Vec<f32>,
    m: Vec<f32>,
    v: Vec<f32>,
    completed_steps: i64,
}

/// A session that closes itself.
struct Session {
    handle: *mut ffi::Session,
    count: usize,
}

impl Session {
    fn open(shape: &ffi::Shape, adamw: &ffi::AdamW, state: &State) -> Result<Session> {
        let count = state.parameters.len();
        assert!(state.m.len() == count && state.v.len() == count);
        let view = ffi::State {
            struct_size: size_of::<ffi::State>() as u32,
            reserved: 0,
            parameters: state.parameters.as_ptr(),
            m: state.m.as_ptr(),
            v: state.v.as_ptr(),
            count: count as u64,
            completed_steps: state.completed_steps,
        };
        let mut handle = ptr::null_mut();
        // SAFETY: the arrays hold `count` floats each and are copied before the call returns. Without options (null) the
        // best device is used.
        check(unsafe { ffi::mjl_session_open(ptr::null(), shape, adamw, &view, &mut handle) })?;
        Ok(Session { handle, count })
    }

    fn step(&mut self, ids: &[i32]) -> Result<f32> {
        let size = size_of::<ffi::StepResult>() as u32;
        let mut result = ffi::StepResult { struct_size: size, loss: 0.0, completed_steps: 0 };
        // SAFETY: `ids` holds as many ids as we say.
        check(unsafe { ffi::mjl_session_step(self.handle, ids.as_ptr(), ids.len() as u64, &mut result) })?;
        Ok(result.loss)
    }

    fn evaluate(&mut self, ids: &[i32]) -> Result<f32> {
        let mut loss = 0.0;
        // SAFETY: as for a step.
        check(unsafe { ffi::mjl_session_evaluate(self.handle, ids.as_ptr(), ids.len() as u64, &mut loss) })?;
        Ok(loss)
    }

    fn export(&mut self) -> Result<State> {
        let zeros = vec![0.0; self.count];
        let mut state = State { parameters: zeros.clone(), m: zeros.clone(), v: zeros, completed_steps: 0 };
        // SAFETY: the three arrays hold `count` floats each.
        check(unsafe {
            ffi::mjl_session_export_state(
                self.handle,
                state.parameters.as_mut_ptr(),
                state.m.as_mut_ptr(),
                state.v.as_mut_ptr(),
                self.count as u64,
                &mut state.completed_steps,
            )
        })?;
        Ok(state)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and is not used again.
        unsafe { ffi::mjl_session_close(self.handle) }
    }
}

/// Random bytes: the top bits of a linear congruential generator.
struct Random(u64);

impl Random {
    fn byte(&mut self) -> i32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 56) as i32
    }
}

/// FNV-1a over the bytes of floats.
fn digest(hash: u64, values: &[f32]) -> u64 {
    let bytes = values.iter().flat_map(|value| value.to_ne_bytes());
    bytes.fold(hash, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100000001b3))
}

fn main() -> Result<()> {
    // SAFETY: takes nothing, cannot fail.
    let abi_version = unsafe { ffi::mjl_abi_version() };
    if abi_version != ffi::ABI_VERSION {
        return Err(format!("the library has ABI version {abi_version}, this program needs {}", ffi::ABI_VERSION));
    }
    let shape = ffi::Shape {
        struct_size: size_of::<ffi::Shape>() as u32,
        batch: 2,
        length: 32,
        d_model: 32,
        n_heads: 4,
        n_kv: 2,
        head_dim: 8,
        intermediate: 64,
        n_layers: 2,
        vocab_size: 256,
        chunked_lm_head_v2: 0,
    };
    let adamw = ffi::AdamW {
        struct_size: size_of::<ffi::AdamW>() as u32,
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
    };
    let block = 2 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32;
    let count = 2 * 256 * 32 + 2 * block;
    let mut random = Random(0);
    let parameters = (0..count).map(|_| (random.byte() - 128) as f32 / 1024.0).collect();
    let start = State { parameters, m: vec![0.0; count], v: vec![0.0; count], completed_steps: 0 };
    let mut batch = move || (0..2 * 33).map(|_| random.byte()).collect::<Vec<i32>>();

    let mut session = Session::open(&shape, &adamw, &start)?;
    let mut losses = Vec::new();
    for _ in 0..20 {
        losses.push(session.step(&batch())?);
    }
    losses.push(session.evaluate(&batch())?);
    println!("loss {:.6} at step 1, {:.6} at step 20; held out {:.6}", losses[0], losses[19], losses[20]);

    // The exported state is all there is to a model: another session goes on from it as if nothing had happened.
    let state = session.export()?;
    drop(session);
    let mut session = Session::open(&shape, &adamw, &state)?;
    losses.push(session.step(&batch())?);
    let state = session.export()?;

    let hash = [&state.parameters, &state.m, &state.v, &losses]
        .iter()
        .fold(0xcbf29ce484222325, |hash, values| digest(hash, values));
    println!("{hash:016x}");
    Ok(())
}
