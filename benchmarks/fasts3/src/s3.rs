//! The objects and uploads, and S3's operations on them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

use crate::http::{percent_decoded, Bytes, Request, Response};

const MOST_KEYS: usize = 1000;
/// No client of ours looks at times.
const TIME: &str = "2026-01-01T00:00:00.000Z";
const HTTP_TIME: &str = "Thu, 01 Jan 2026 00:00:00 GMT";

#[derive(Clone)]
struct Object {
    parts: Vec<Bytes>,
    num_bytes: usize,
    etag: String,
}

struct Upload {
    path: String,
    parts: BTreeMap<u32, Bytes>,
}

/// All that is stored. Paths are `bucket/key`, and each bucket exists.
#[derive(Default)]
pub struct Contents {
    objects: BTreeMap<String, Object>,
    uploads: BTreeMap<String, Upload>,
    /// ETags and upload ids so far.
    num_names: u64,
}

impl Contents {
    pub fn answer(&mut self, request: Request) -> Response {
        let query = &request.query;
        let bucket = request.path.trim_end_matches('/');
        if !bucket.contains('/') {
            return match request.method.as_str() {
                "PUT" | "HEAD" => Response::empty(200),
                "GET" if query.contains_key("uploads") => self.list_uploads(&request, bucket),
                "GET" => self.list_objects(&request, bucket),
                "POST" if query.contains_key("delete") => self.delete_objects(&request, bucket),
                _ => error(501, "NotImplemented", &request.path),
            };
        }
        let is_copy = request.headers.contains_key("x-amz-copy-source");
        match request.method.as_str() {
            "POST" if query.contains_key("uploads") => self.create_upload(&request),
            "POST" if query.contains_key("uploadId") => self.complete_upload(&request),
            "PUT" if is_copy && query.contains_key("uploadId") => self.copy_part(&request),
            "PUT" if is_copy => self.copy_object(&request),
            "PUT" if query.contains_key("uploadId") => self.put_part(request),
            "PUT" => self.put_object(request),
            "GET" | "HEAD" => self.get_object(&request),
            "DELETE" => self.delete(&request),
            _ => error(501, "NotImplemented", &request.path),
        }
    }

    fn put_object(&mut self, request: Request) -> Response {
        if self.is_refused(&request) {
            return error(412, "PreconditionFailed", &request.path);
        }
        let etag = self.new_name("object");
        let object = Object { num_bytes: request.body.len(), parts: vec![Arc::new(request.body)], etag: etag.clone() };
        self.objects.insert(request.path, object);
        Response::empty(200).with("ETag", &quoted(&etag))
    }

    fn get_object(&self, request: &Request) -> Response {
        let object = match self.objects.get(&request.path) {
            Some(object) => object,
            None => return error(404, "NoSuchKey", &request.path),
        };
        let wanted = request.headers.get("range").and_then(|text| parsed_range(text, object.num_bytes));
        let response = match wanted {
            None => Response::new(200, pieces(&object.parts, 0..object.num_bytes)),
            Some(range) if range.is_empty() => return error(416, "InvalidRange", &request.path),
            Some(range) => {
                let shown = format!("bytes {}-{}/{}", range.start, range.end - 1, object.num_bytes);
                Response::new(206, pieces(&object.parts, range)).with("Content-Range", &shown)
            }
        };
        response
            .with("ETag", &quoted(&object.etag))
            .with("Accept-Ranges", "bytes")
            .with("Last-Modified", HTTP_TIME)
            .with("Content-Type", "binary/octet-stream")
    }

    fn copy_object(&mut self, request: &Request) -> Response {
        let source = percent_decoded(request.headers["x-amz-copy-source"].trim_start_matches('/'));
        let object = match self.objects.get(&source) {
            Some(object) => object.clone(),
            None => return error(404, "NoSuchKey", &source),
        };
        let etag = quoted(&object.etag);
        self.objects.insert(request.path.clone(), object);
        let elements = format!("<ETag>{etag}</ETag><LastModified>{TIME}</LastModified>");
        Response::xml(200, &format!("<CopyObjectResult>{elements}</CopyObjectResult>"))
    }

    /// Make a part of a range of an object, and answer with its CRC32C, as S3 does.
    fn copy_part(&mut self, request: &Request) -> Response {
        let source = percent_decoded(request.headers["x-amz-copy-source"].trim_start_matches('/'));
        let number = request.query.get("partNumber").and_then(|text| text.parse().ok());
        let object = self.objects.get(&source);
        let range = request.headers.get("x-amz-copy-source-range");
        let range = object.zip(range).and_then(|(object, text)| parsed_range(text, object.num_bytes));
        let (object, range, number) = match (object, range, number) {
            (None, _, _) => return error(404, "NoSuchKey", &source),
            (Some(object), Some(range), Some(number)) if !range.is_empty() => (object, range, number),
            _ => return error(400, "InvalidArgument", &request.path),
        };
        let mut body = Vec::with_capacity(range.len());
        for (part, own) in pieces(&object.parts, range) {
            body.extend_from_slice(&part[own]);
        }
        let checksum = base64(&crc32c(&body).to_be_bytes());
        match self.uploads.get_mut(&request.query["uploadId"]) {
            Some(upload) => drop(upload.parts.insert(number, Arc::new(body))),
            None => return error(404, "NoSuchUpload", &request.path),
        }
        let etag = quoted(&self.new_name("part"));
        let elements = format!(
            "<ETag>{etag}</ETag><LastModified>{TIME}</LastModified><ChecksumCRC32C>{checksum}</ChecksumCRC32C>"
        );
        Response::xml(200, &format!("<CopyPartResult>{elements}</CopyPartResult>"))
    }

    /// Delete an object, or the upload that the query names.
    fn delete(&mut self, request: &Request) -> Response {
        match request.query.get("uploadId") {
            Some(id) => drop(self.uploads.remove(id)),
            None => drop(self.objects.remove(&request.path)),
        }
        Response::empty(204)
    }

    fn delete_objects(&mut self, request: &Request, bucket: &str) -> Response {
        let text = String::from_utf8_lossy(&request.body);
        let mut deleted = String::new();
        for part in text.split("<Key>").skip(1) {
            let key = part.split("</Key>").next().unwrap_or_default();
            self.objects.remove(&format!("{bucket}/{}", unescaped(key)));
            let _ = write!(deleted, "<Deleted><Key>{key}</Key></Deleted>");
        }
        Response::xml(200, &format!("<DeleteResult>{deleted}</DeleteResult>"))
    }

    fn list_objects(&self, request: &Request, bucket: &str) -> Response {
        let argument = |name: &str| request.query.get(name).map_or("", |value| value.as_str());
        let prefix = argument("prefix");
        let delimiter = argument("delimiter");
        let after = [argument("continuation-token"), argument("start-after")].into_iter().max().unwrap_or_default();
        let most_keys = argument("max-keys").parse().unwrap_or(MOST_KEYS);
        let start = format!("{bucket}/{prefix}");
        let keys = self
            .objects
            .range(start.clone()..)
            .take_while(|(path, _)| path.starts_with(&start))
            .map(|(path, object)| (&path[bucket.len() + 1..], object))
            .filter(|(key, _)| *key > after);
        let mut contents = String::new();
        let mut folders = BTreeSet::new();
        let mut num_keys = 0;
        let mut last = "";
        let mut is_truncated = false;
        for (key, object) in keys {
            let folder = match key[prefix.len()..].find(delimiter) {
                Some(position) if !delimiter.is_empty() => Some(&key[..prefix.len() + position + delimiter.len()]),
                _ => None,
            };
            if let Some(folder) = folder {
                folders.insert(folder);
                continue;
            }
            if num_keys == most_keys {
                is_truncated = true;
                break;
            }
            num_keys += 1;
            last = key;
            let _ = write!(
                contents,
                "<Contents><Key>{}</Key><LastModified>{TIME}</LastModified><ETag>{}</ETag><Size>{}</Size>\
                 <StorageClass>STANDARD</StorageClass></Contents>",
                escaped(key),
                quoted(&object.etag),
                object.num_bytes
            );
        }
        for folder in &folders {
            let _ = write!(contents, "<CommonPrefixes><Prefix>{}</Prefix></CommonPrefixes>", escaped(folder));
        }
        if is_truncated {
            let _ = write!(contents, "<NextContinuationToken>{}</NextContinuationToken>", escaped(last));
        }
        let about = format!(
            "<Name>{bucket}</Name><Prefix>{}</Prefix><KeyCount>{}</KeyCount><MaxKeys>{most_keys}</MaxKeys>\
             <IsTruncated>{is_truncated}</IsTruncated>",
            escaped(prefix),
            num_keys + folders.len()
        );
        Response::xml(200, &format!("<ListBucketResult>{about}{contents}</ListBucketResult>"))
    }

    fn create_upload(&mut self, request: &Request) -> Response {
        let id = self.new_name("upload");
        let (bucket, key) = split(&request.path);
        let elements = format!("<Bucket>{bucket}</Bucket><Key>{}</Key><UploadId>{id}</UploadId>", escaped(key));
        self.uploads.insert(id, Upload { path: request.path.clone(), parts: BTreeMap::new() });
        Response::xml(200, &format!("<InitiateMultipartUploadResult>{elements}</InitiateMultipartUploadResult>"))
    }

    fn put_part(&mut self, request: Request) -> Response {
        let number = request.query.get("partNumber").and_then(|text| text.parse().ok());
        let etag = self.new_name("part");
        match (self.uploads.get_mut(&request.query["uploadId"]), number) {
            (Some(upload), Some(number)) => drop(upload.parts.insert(number, Arc::new(request.body))),
            (None, _) => return error(404, "NoSuchUpload", &request.path),
            (_, None) => return error(400, "InvalidArgument", &request.path),
        }
        // Clients compare the checksum that comes back with the one that they sent.
        let checksums = request.headers.iter().filter(|(name, _)| name.starts_with("x-amz-checksum-"));
        let response = Response::empty(200).with("ETag", &quoted(&etag));
        checksums.fold(response, |response, (name, value)| response.with(name, value))
    }

    /// Make an object of all parts that the upload has, in the order of their numbers.
    fn complete_upload(&mut self, request: &Request) -> Response {
        if self.is_refused(request) {
            return error(412, "PreconditionFailed", &request.path);
        }
        let upload = match self.uploads.remove(&request.query["uploadId"]) {
            Some(upload) => upload,
            None => return error(404, "NoSuchUpload", &request.path),
        };
        let etag = format!("{}-{}", self.new_name("object"), upload.parts.len());
        let parts: Vec<Bytes> = upload.parts.into_values().collect();
        let num_bytes = parts.iter().map(|part| part.len()).sum();
        let (bucket, key) = split(&upload.path);
        let elements = format!("<Bucket>{bucket}</Bucket><Key>{}</Key><ETag>{}</ETag>", escaped(key), quoted(&etag));
        self.objects.insert(upload.path, Object { parts, num_bytes, etag });
        Response::xml(200, &format!("<CompleteMultipartUploadResult>{elements}</CompleteMultipartUploadResult>"))
    }

    fn list_uploads(&self, request: &Request, bucket: &str) -> Response {
        let start = format!("{bucket}/{}", request.query.get("prefix").map_or("", |value| value.as_str()));
        let mut uploads = String::new();
        for (id, upload) in self.uploads.iter().filter(|(_, upload)| upload.path.starts_with(&start)) {
            let key = escaped(split(&upload.path).1);
            let elements = format!("<Key>{key}</Key><UploadId>{id}</UploadId><Initiated>{TIME}</Initiated>");
            let _ = write!(uploads, "<Upload>{elements}</Upload>");
        }
        let elements = format!("<IsTruncated>false</IsTruncated>{uploads}");
        Response::xml(200, &format!("<ListMultipartUploadsResult>{elements}</ListMultipartUploadsResult>"))
    }

    /// Whether the object may only be created and exists.
    fn is_refused(&self, request: &Request) -> bool {
        request.headers.contains_key("if-none-match") && self.objects.contains_key(&request.path)
    }

    fn new_name(&mut self, kind: &str) -> String {
        self.num_names += 1;
        format!("{kind}{}", self.num_names)
    }
}

fn error(status: u16, code: &str, path: &str) -> Response {
    let elements = format!("<Code>{code}</Code><Message>{code}</Message><Key>{}</Key>", escaped(path));
    Response::xml(status, &format!("<Error>{elements}<RequestId>1</RequestId></Error>"))
}

/// The half-open range of a header `bytes=first-last`, which may be empty; None if the header is not one range.
///
/// S3 ignores such a header, several ranges included, and answers with the whole object.
fn parsed_range(text: &str, num_bytes: usize) -> Option<Range<usize>> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let number = |digits: &str| digits.parse::<usize>().ok();
    match (first, last) {
        ("", last) => Some(num_bytes.saturating_sub(number(last)?)..num_bytes),
        (first, "") => Some(number(first)?..num_bytes),
        (first, last) => Some(number(first)?..num_bytes.min(number(last)?.saturating_add(1))),
    }
}

/// The pieces of the parts that a half-open range of the object consists of.
fn pieces(parts: &[Bytes], wanted: Range<usize>) -> Vec<(Bytes, Range<usize>)> {
    let mut found = Vec::new();
    let mut start = 0;
    for part in parts {
        let end = start + part.len();
        if start < wanted.end && wanted.start < end {
            found.push((Arc::clone(part), wanted.start.max(start) - start..wanted.end.min(end) - start));
        }
        start = end;
    }
    found
}

/// The CRC32C of the bytes, eight at a time.
fn crc32c(body: &[u8]) -> u32 {
    let mut tables = [[0u32; 256]; 8];
    for byte in 0..256u32 {
        tables[0][byte as usize] =
            (0..8).fold(byte, |value, _| if value & 1 == 1 { (value >> 1) ^ 0x82f6_3b78 } else { value >> 1 });
    }
    for row in 1..8 {
        for byte in 0..256 {
            let before = tables[row - 1][byte];
            tables[row][byte] = (before >> 8) ^ tables[0][(before & 0xff) as usize];
        }
    }
    let mut value = !0u32;
    let mut words = body.chunks_exact(8);
    for word in &mut words {
        let mut bytes: [u8; 8] = word.try_into().expect("eight bytes");
        bytes.iter_mut().zip(value.to_le_bytes()).for_each(|(byte, own)| *byte ^= own);
        value = bytes.iter().enumerate().fold(0, |sum, (index, byte)| sum ^ tables[7 - index][*byte as usize]);
    }
    for byte in words.remainder() {
        value = (value >> 8) ^ tables[0][((value ^ u32::from(*byte)) & 0xff) as usize];
    }
    !value
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits = (0..3).fold(0u32, |bits, index| bits << 8 | u32::from(*group.get(index).unwrap_or(&0)));
        for index in 0..4 {
            let digit = char::from(DIGITS[(bits >> (18 - 6 * index) & 63) as usize]);
            text.push(if index > group.len() { '=' } else { digit });
        }
    }
    text
}

fn split(path: &str) -> (&str, &str) {
    path.split_once('/').unwrap_or((path, ""))
}

fn quoted(etag: &str) -> String {
    format!("\"{etag}\"")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn unescaped(text: &str) -> String {
    text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
}
