//! An S3-compatible server in memory, to measure clients on loopback. README.md says what it does not do.

#![forbid(unsafe_code)]

mod http;
mod s3;

use std::env;
use std::io::{self, BufReader};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use http::{Request, Response};
use s3::Contents;

const USAGE: &str = "usage: fasts3 PORT [LATENCY_MS [MB_S_PER_CONNECTION]]";
const READ_BUFFER_BYTES: usize = 1 << 16;

/// A network that is slower than loopback: the time to the first byte of an answer, and the rate of a connection.
#[derive(Clone, Copy)]
struct Pace {
    latency_s: f64,
    /// 0: as fast as it can.
    bytes_per_s: f64,
}

impl Pace {
    /// Sleep until an exchange of so many bytes, which began at `started`, may be answered.
    fn wait(self, started: Instant, num_bytes: usize) {
        let mut wanted_s = self.latency_s;
        if self.bytes_per_s > 0.0 {
            wanted_s += num_bytes as f64 / self.bytes_per_s;
        }
        let left_s = wanted_s - started.elapsed().as_secs_f64();
        if left_s > 0.0 {
            thread::sleep(Duration::from_secs_f64(left_s));
        }
    }
}

#[derive(Default)]
struct Server {
    contents: Mutex<Contents>,
    /// Of bodies, since the last reset.
    num_bytes_received: AtomicU64,
    num_bytes_sent: AtomicU64,
    num_requests: AtomicU64,
}

impl Server {
    /// Answer the requests of one connection, one after the other, until the client closes it.
    fn serve(&self, stream: TcpStream, pace: Pace) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let mut writer = stream.try_clone()?;
        let mut reader = BufReader::with_capacity(READ_BUFFER_BYTES, stream);
        while let Some(request) = Request::read(&mut reader, &mut writer)? {
            let is_head = request.method == "HEAD";
            match request.path.as_str() {
                "_stats" => self.stats().write(&mut writer, is_head)?,
                "_reset" => self.reset().write(&mut writer, is_head)?,
                _ => {
                    self.num_requests.fetch_add(1, Ordering::Relaxed);
                    let started = request.started;
                    let num_bytes_received = request.body.len();
                    let response = self.answer(request);
                    let num_bytes_sent = if is_head { 0 } else { response.num_bytes() };
                    self.num_bytes_received.fetch_add(num_bytes_received as u64, Ordering::Relaxed);
                    self.num_bytes_sent.fetch_add(num_bytes_sent as u64, Ordering::Relaxed);
                    pace.wait(started, num_bytes_received + num_bytes_sent);
                    response.write(&mut writer, is_head)?;
                }
            }
        }
        Ok(())
    }

    fn answer(&self, request: Request) -> Response {
        // An answer holds references to the stored bytes, so the lock is free while they are sent.
        self.contents.lock().expect("no answer panics").answer(request)
    }

    fn stats(&self) -> Response {
        let num_bytes_received = self.num_bytes_received.load(Ordering::Relaxed);
        let num_bytes_sent = self.num_bytes_sent.load(Ordering::Relaxed);
        let num_requests = self.num_requests.load(Ordering::Relaxed);
        Response::text(format!("in {num_bytes_received} out {num_bytes_sent} requests {num_requests}\n"))
    }

    fn reset(&self) -> Response {
        *self.contents.lock().expect("no answer panics") = Contents::default();
        self.num_bytes_received.store(0, Ordering::Relaxed);
        self.num_bytes_sent.store(0, Ordering::Relaxed);
        self.num_requests.store(0, Ordering::Relaxed);
        Response::text("reset\n".to_string())
    }
}

/// The port and the pace, or None if the arguments make no sense.
fn parsed(arguments: &[String]) -> Option<(u16, Pace)> {
    let number = |position: usize| match arguments.get(position) {
        Some(text) => text.parse::<f64>().ok().filter(|value| value.is_finite() && *value >= 0.0),
        None => Some(0.0),
    };
    if arguments.len() > 3 {
        return None;
    }
    let port = arguments.first()?.parse().ok()?;
    let pace = Pace { latency_s: number(1)? / 1e3, bytes_per_s: number(2)? * 1e6 };
    Some((port, pace))
}

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let (port, pace) = match parsed(&arguments) {
        Some(given) => given,
        None => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    let listener = match TcpListener::bind(("127.0.0.1", port)) {
        Ok(listener) => listener,
        Err(error) => {
            eprintln!("fasts3 cannot listen on port {port}: {error}");
            return ExitCode::FAILURE;
        }
    };
    let server = Arc::new(Server::default());
    for stream in listener.incoming().flatten() {
        let server = Arc::clone(&server);
        // A connection that breaks ends its thread: the client opens another one.
        thread::spawn(move || server.serve(stream, pace));
    }
    ExitCode::SUCCESS
}
