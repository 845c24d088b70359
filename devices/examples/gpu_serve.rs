// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sessions of the gpu device without the service: listens on a unix socket and gives each client a render server and a
//! session of its own, for trying clients and measuring. Restricts nothing.
//!
//! usage: gpu_serve SOCKET RENDERER_ROOT
//!
//! RENDERER_ROOT is what `tools/engine-root gpu` makes. This program is started through the root's own loader, see
//! `docs/gpu.md`. Prints what sessions say, and the end of each process.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use lighter_devices::engine_root::{self, Loader, library_folder};
use lighter_devices::gpu::control::{FromSession, SessionConfig, ToSession};
use lighter_devices::gpu::session::Limits;
use lighter_devices::gpu::worker;
use rustix::io::FdFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.as_slice() {
        [_, first] if first == "--session" => Ok(worker::run(&rustix::io::dup(rustix::stdio::stdin())?)?),
        [program, socket, root] => {
            let _ = std::fs::remove_file(socket);
            for (client, stream) in UnixListener::bind(socket)?.incoming().flatten().zip(1..) {
                let (program, root) = (program.clone(), PathBuf::from(root));
                std::thread::spawn(move || {
                    if let Err(error) = serve(&program, &root, client, stream) {
                        eprintln!("stream {stream}: {error}");
                    }
                });
            }
            Ok(())
        }
        _ => Err("usage: gpu_serve SOCKET RENDERER_ROOT".into()),
    }
}

/// A command that runs a program with the libraries of the root.
fn in_root(root: &Path, program: &Path) -> Command {
    engine_root::command(program, Loader::of_root(root).as_ref(), &[])
}

fn render_server(root: &Path, socket: &OwnedFd) -> Result<Child, Failure> {
    let mut command = in_root(root, &root.join("usr/libexec/virgl_render_server"));
    command.arg("--socket-fd").arg(socket.as_raw_fd().to_string());
    let layer = std::env::var_os("LIGHTER_HOSTMEM");
    command.env("VK_DRIVER_FILES", root.join("usr/share/vulkan/icd.d/lvp_icd.json"));
    command.env("MESA_SHADER_CACHE_DISABLE", "true");
    if let Some(folder) = layer {
        command.env("VK_ADD_LAYER_PATH", folder).env("VK_INSTANCE_LAYERS", "VK_LAYER_LIGHTER_hostmem");
    }
    // Others that are started meanwhile may get it too, which does no harm here.
    rustix::io::fcntl_setfd(socket, FdFlags::empty())?;
    Ok(command.spawn()?)
}

fn serve(program: &str, root: &Path, client: UnixStream, stream: u64) -> Result<(), Failure> {
    let pair = || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (server_ours, server_theirs) = pair()?;
    let (near, far) = pair()?;
    let mut server = render_server(root, &server_theirs)?;
    drop(server_theirs);
    let mut session = in_root(root, Path::new(program)).arg("--session").stdin(Stdio::from(far)).spawn()?;
    let limits =
        Limits { max_contexts: 1, max_blobs: 65_536, max_blob_bytes: 64 << 30, max_request_bytes: 4 << 20 };
    let library = library_folder(root).join("libvirglrenderer.so.1");
    let configure = ToSession::Configure(SessionConfig { library, limits });
    lighter_wire::send(near.as_fd(), &configure, &[server_ours.as_fd()])?;
    drop(server_ours);
    lighter_wire::send(near.as_fd(), &ToSession::Stream { stream }, &[client.as_fd()])?;
    drop(client);
    while let Some((message, _)) = lighter_wire::recv::<FromSession>(near.as_fd())? {
        eprintln!("stream {stream}: {message:?}");
    }
    eprintln!("stream {stream}: session {}", session.wait()?);
    server.kill()?;
    eprintln!("stream {stream}: render server {}", server.wait()?);
    Ok(())
}
