//! Requests and responses of HTTP/1.1, as far as clients of S3 use it.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

pub type Bytes = Arc<Vec<u8>>;

pub struct Request {
    pub method: String,
    /// Decoded, without the slash in front: `bucket/key`.
    pub path: String,
    pub query: HashMap<String, String>,
    /// By their names in lower case.
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
    /// When its first line was there.
    pub started: Instant,
}

impl Request {
    /// Read the next request, or None if the client has closed the connection.
    pub fn read(reader: &mut BufReader<TcpStream>, writer: &mut TcpStream) -> io::Result<Option<Request>> {
        let first = read_line(reader)?;
        if first.is_empty() {
            return Ok(None);
        }
        let started = Instant::now();
        let mut words = first.split_whitespace();
        let method = words.next().unwrap_or_default().to_string();
        let target = words.next().unwrap_or_default();
        // A client may also send the whole address (RFC 9112, 3.2.2), as the AWS SDK for C++ does.
        let target = match target.strip_prefix("http://") {
            Some(rest) => rest.split_once('/').map_or("", |(_, path)| path),
            None => target,
        };
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let headers = read_headers(reader)?;
        if headers.get("expect").map_or(false, |value| value.eq_ignore_ascii_case("100-continue")) {
            writer.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        let body = read_body(reader, &headers)?;
        Ok(Some(Request {
            method,
            path: percent_decoded(path.trim_start_matches('/')),
            query: parsed_query(query),
            headers,
            body,
            started,
        }))
    }
}

pub struct Response {
    status: u16,
    headers: Vec<(String, String)>,
    /// Half-open ranges of bytes, which are sent one after the other.
    body: Vec<(Bytes, Range<usize>)>,
}

impl Response {
    pub fn new(status: u16, body: Vec<(Bytes, Range<usize>)>) -> Response {
        Response { status, headers: Vec::new(), body }
    }

    pub fn empty(status: u16) -> Response {
        Response::new(status, Vec::new())
    }

    pub fn text(text: String) -> Response {
        let num_bytes = text.len();
        Response::new(200, vec![(Arc::new(text.into_bytes()), 0..num_bytes)])
    }

    pub fn xml(status: u16, elements: &str) -> Response {
        let text = format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?>{elements}");
        Response { status, ..Response::text(text) }.with("Content-Type", "application/xml")
    }

    pub fn with(mut self, name: &str, value: &str) -> Response {
        self.headers.push((name.to_string(), value.to_string()));
        self
    }

    pub fn num_bytes(&self) -> usize {
        self.body.iter().map(|(_, range)| range.len()).sum()
    }

    /// Send it; the answer to a HEAD request has the headers alone.
    pub fn write(&self, writer: &mut TcpStream, is_head: bool) -> io::Result<()> {
        let mut head = format!("HTTP/1.1 {} -\r\nServer: fasts3\r\n", self.status);
        // A status of 204 allows no length.
        if self.status != 204 {
            let _ = write!(head, "Content-Length: {}\r\n", self.num_bytes());
        }
        for (name, value) in &self.headers {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        head.push_str("\r\n");
        writer.write_all(head.as_bytes())?;
        if !is_head {
            for (bytes, range) in &self.body {
                writer.write_all(&bytes[range.clone()])?;
            }
        }
        Ok(())
    }
}

/// `%41` is `A`, and `+` is a blank.
pub fn percent_decoded(text: &str) -> String {
    let encoded = text.as_bytes();
    let mut decoded = Vec::with_capacity(encoded.len());
    let mut position = 0;
    while position < encoded.len() {
        let byte = match encoded[position] {
            b'%' => {
                let digits = text.get(position + 1..position + 3);
                let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
                position += if byte.is_some() { 2 } else { 0 };
                byte.unwrap_or(b'%')
            }
            b'+' => b' ',
            other => other,
        };
        decoded.push(byte);
        position += 1;
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

fn parsed_query(query: &str) -> HashMap<String, String> {
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .map(|(name, value)| (percent_decoded(name), percent_decoded(value)))
        .collect()
}

fn read_headers(reader: &mut impl BufRead) -> io::Result<HashMap<String, String>> {
    let mut headers = HashMap::new();
    loop {
        let line = read_line(reader)?;
        match line.trim_end().split_once(':') {
            Some((name, value)) => headers.insert(name.to_ascii_lowercase(), value.trim().to_string()),
            None => return Ok(headers),
        };
    }
}

fn read_body(reader: &mut impl BufRead, headers: &HashMap<String, String>) -> io::Result<Vec<u8>> {
    let contains = |name: &str, part: &str| headers.get(name).map_or(false, |value| value.contains(part));
    let body = if contains("transfer-encoding", "chunked") {
        read_chunks(reader)?
    } else {
        let length = headers.get("content-length").map_or(Ok(0), |value| value.parse());
        let mut body = vec![0; length.map_err(|_| malformed("the length of a body"))?];
        reader.read_exact(&mut body)?;
        body
    };
    // S3's own chunks lie inside of HTTP's: they carry signatures, and a checksum at the end.
    if contains("content-encoding", "aws-chunked") || contains("x-amz-content-sha256", "STREAMING") {
        return read_chunks(&mut body.as_slice());
    }
    Ok(body)
}

/// Read chunks, each after a line with its length in hexadecimal digits, up to the empty one and the lines behind it.
fn read_chunks(reader: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line = read_line(reader)?;
        let digits = line.split(';').next().unwrap_or_default().trim();
        let num_bytes = usize::from_str_radix(digits, 16).map_err(|_| malformed("the length of a chunk"))?;
        if num_bytes == 0 {
            while !read_line(reader)?.trim_end().is_empty() {}
            return Ok(body);
        }
        let start = body.len();
        body.resize(start + num_bytes, 0);
        reader.read_exact(&mut body[start..])?;
        read_line(reader)?;
    }
}

/// The next line with its end, or an empty text at the end of the input.
fn read_line(reader: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    Ok(line)
}

fn malformed(of: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("{of} is malformed"))
}
