//! `keep cp`: files and directories into and out of sandboxes.
//!
//! The rules are those of `cp`: what exists as a directory is copied *into*, under the source's name;
//! a source that ends in `/.` means what is in it. Directories travel as one tar stream.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use indicatif::ProgressBar;
use sandkeep_client::types::EntryKind;
use sandkeep_client::{Download, Error as ClientError, Place, Upload, WriteOptions};
use serde::Serialize;
use tokio::sync::mpsc;

use super::image::bar_if;
use super::tar::{Counted, pack, unpack, without_top};
use super::{Context, bytes};
use crate::args::CopyArgs;
use crate::failure::Failure;
use crate::terminal;

/// One end of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    Here(PathBuf),
    There { sandbox: String, path: String },
    Stream,
}

impl End {
    /// `NAME:PATH` is in a sandbox. A path here that has a colon is written with a slash before it.
    fn parse(text: &str) -> Self {
        if text == "-" {
            return Self::Stream;
        }
        let name_like = |name: &str| {
            !name.is_empty()
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
        };
        match text.split_once(':') {
            Some((name, path)) if name_like(name) => Self::There {
                sandbox: name.to_owned(),
                path: if path.is_empty() { "." } else { path }.to_owned(),
            },
            _ => Self::Here(PathBuf::from(text)),
        }
    }
}

/// What was copied.
#[derive(Debug, Serialize)]
struct Copied {
    files: u64,
    bytes: u64,
}

pub(super) async fn copy(context: &Context, args: &CopyArgs) -> Result<(), Failure> {
    let job = Job { context, args, bar: bar_if(!args.quiet, None) };
    let copied = match (End::parse(&args.from), End::parse(&args.to)) {
        (End::Here(from), End::There { sandbox, path }) => job.upload(&from, &sandbox, &path).await,
        (End::There { sandbox, path }, End::Here(to)) => job.download(&sandbox, &path, &to).await,
        (End::Stream, End::There { sandbox, path }) => {
            let upload = Upload::channel(terminal::keystrokes());
            let to = job.place(&sandbox, &path);
            let moved = context.client.write_file(to, WriteOptions::default(), upload).await?;
            Ok(Copied { files: 1, bytes: moved.bytes })
        }
        (End::There { sandbox, path }, End::Stream) => {
            return job.print(&sandbox, &path).await;
        }
        (End::There { sandbox: one, path: from }, End::There { sandbox: other, path: to }) => {
            job.transfer(&one, &from, &other, &to).await
        }
        _ => {
            let hint = "a path in a sandbox is written NAME:/path";
            Err(Failure::here("neither end is in a sandbox").with_hint(hint))
        }
    };
    job.bar.finish_and_clear();
    context.screen.answer(&copied?, |copied| {
        let noun = if copied.files == 1 { "file" } else { "files" };
        format!("{} {noun}, {}\n", copied.files, bytes(copied.bytes))
    })
}

struct Job<'a> {
    context: &'a Context,
    args: &'a CopyArgs,
    bar: ProgressBar,
}

impl Job<'_> {
    fn place<'a>(&'a self, sandbox: &'a str, path: &'a str) -> Place<'a> {
        Place { sandbox, path, user: self.args.user.as_deref(), if_running: self.args.if_running }
    }

    async fn upload(&self, from: &Path, sandbox: &str, path: &str) -> Result<Copied, Failure> {
        let cannot = |error| {
            Failure::caused(format!("cannot read `{}` on this machine", from.display()), error)
                .with_hint("check the path; a path in a sandbox is written NAME:/path")
        };
        let metadata = std::fs::metadata(from).map_err(cannot)?;
        if metadata.is_dir() && !self.args.recursive {
            return Err(directory_refused(&from.display().to_string()));
        }
        let into = self.is_directory_there(sandbox, path).await?;
        let contents = from.to_string_lossy().ends_with("/.");
        let name = from.canonicalize().map_err(cannot)?;
        let name = name.file_name().map(|name| name.to_string_lossy().into_owned());
        let target = match name {
            Some(name) if !contents && (into || path.ends_with('/')) => {
                format!("{}/{name}", path.trim_end_matches('/'))
            }
            _ => path.to_owned(),
        };
        self.bar.set_message(target.clone());
        let place = self.place(sandbox, &target);
        if metadata.is_dir() {
            let archive = pack(from.to_path_buf(), self.bar.clone());
            let moved = self.context.client.tar_in(place, Upload::channel(archive)).await?;
            return Ok(Copied { files: moved.files, bytes: moved.bytes });
        }
        let file = tokio::fs::File::open(from).await.map_err(cannot)?;
        let upload = Upload::reader(Counted::new(file, self.bar.clone()));
        let mode = Some(metadata.permissions().mode() & 0o777);
        let options = WriteOptions { mode, ..WriteOptions::default() };
        let moved = self.context.client.write_file(place, options, upload).await?;
        Ok(Copied { files: 1, bytes: moved.bytes })
    }

    async fn download(&self, sandbox: &str, path: &str, to: &Path) -> Result<Copied, Failure> {
        let entry = self.context.client.stat(self.place(sandbox, path)).await?;
        let directory = entry.kind == EntryKind::Directory;
        if directory && !self.args.recursive {
            return Err(directory_refused(&format!("{sandbox}:{path}")));
        }
        let plain = path.strip_suffix("/.").unwrap_or(path).trim_end_matches('/');
        let name = plain.rsplit('/').next().filter(|name| !["", ".", ".."].contains(name));
        let target = match name {
            Some(name) if to.is_dir() && !path.ends_with("/.") => to.join(name),
            _ => to.to_path_buf(),
        };
        self.bar.set_message(target.display().to_string());
        let cannot = |error| {
            Failure::caused(format!("cannot write `{}` on this machine", target.display()), error)
                .with_hint("name a directory that exists and that you may write to")
        };
        if directory {
            let plain = if plain.is_empty() { "/" } else { plain };
            let download = self.context.client.tar_out(self.place(sandbox, plain)).await?;
            let (pieces, count) = self.flow(download);
            let (top, place) = (name.map(str::to_owned), target.clone());
            let unpacking = tokio::task::spawn_blocking(move || unpack(pieces, top, &place));
            let (bytes, unpacked) = tokio::join!(count, unpacking);
            let unpacked = unpacked.map_err(|error| Failure::caused("unpacking failed", error))?;
            return match (unpacked, bytes) {
                // The server's reason says more than "the archive ends early".
                (_, Err(error)) => Err(error.into()),
                (Err(error), Ok(_)) => Err(cannot(error)),
                (Ok(done), Ok(_)) => Ok(Copied { files: done.files, bytes: done.bytes }),
            };
        }
        let mut download = self.context.client.read_file(self.place(sandbox, path)).await?;
        let mut file = tokio::fs::File::create(&target).await.map_err(cannot)?;
        let mut total = 0;
        while let Some(piece) = download.next().await? {
            tokio::io::AsyncWriteExt::write_all(&mut file, &piece).await.map_err(cannot)?;
            total += piece.len() as u64;
            self.bar.set_position(total);
        }
        tokio::io::AsyncWriteExt::flush(&mut file).await.map_err(cannot)?;
        let mode = std::fs::Permissions::from_mode(entry.mode & 0o777);
        std::fs::set_permissions(&target, mode).map_err(cannot)?;
        Ok(Copied { files: 1, bytes: total })
    }

    /// Copies from one sandbox to another, through here: nothing is kept on this machine.
    async fn transfer(
        &self,
        source: &str,
        from: &str,
        target: &str,
        to: &str,
    ) -> Result<Copied, Failure> {
        let client = &self.context.client;
        let entry = client.stat(self.place(source, from)).await?;
        let directory = entry.kind == EntryKind::Directory;
        if directory && !self.args.recursive {
            return Err(directory_refused(&format!("{source}:{from}")));
        }
        let plain = from.strip_suffix("/.").unwrap_or(from).trim_end_matches('/');
        let name = plain.rsplit('/').next().filter(|name| !["", ".", ".."].contains(name));
        let into = !from.ends_with("/.")
            && (to.ends_with('/') || self.is_directory_there(target, to).await?);
        let destination = match name {
            Some(name) if into => format!("{}/{name}", to.trim_end_matches('/')),
            _ => to.to_owned(),
        };
        self.bar.set_message(format!("{target}:{destination}"));
        let place = self.place(target, &destination);
        if directory {
            let plain = if plain.is_empty() { "/" } else { plain };
            let download = client.tar_out(self.place(source, plain)).await?;
            let (pieces, count) = self.flow(download);
            let archive = without_top(pieces, name.map(str::to_owned));
            let (sent, moved) = tokio::join!(count, client.tar_in(place, Upload::channel(archive)));
            // The reason of the source says more than "the archive ends early".
            sent?;
            let moved = moved?;
            return Ok(Copied { files: moved.files, bytes: moved.bytes });
        }
        let download = client.read_file(self.place(source, from)).await?;
        let (pieces, count) = self.flow(download);
        let options = WriteOptions { mode: Some(entry.mode & 0o777), ..WriteOptions::default() };
        let (sent, moved) =
            tokio::join!(count, client.write_file(place, options, Upload::channel(pieces)));
        sent?;
        Ok(Copied { files: 1, bytes: moved?.bytes })
    }

    async fn print(&self, sandbox: &str, path: &str) -> Result<(), Failure> {
        let mut download = self.context.client.read_file(self.place(sandbox, path)).await?;
        while let Some(piece) = download.next().await? {
            self.context.screen.bytes(&piece)?;
        }
        Ok(())
    }

    /// Hands a download to another thread piece by piece, and says how it ended.
    fn flow(
        &self,
        mut download: Download,
    ) -> (mpsc::Receiver<io::Result<Bytes>>, impl Future<Output = Result<u64, ClientError>>) {
        let (sender, receiver) = mpsc::channel(8);
        let bar = self.bar.clone();
        let flowing = async move {
            let mut total = 0;
            loop {
                match download.next().await {
                    Ok(Some(piece)) => {
                        total += piece.len() as u64;
                        bar.set_position(total);
                        if sender.send(Ok(piece)).await.is_err() {
                            // The receiver gave up, and says why.
                            return Ok(total);
                        }
                    }
                    Ok(None) => return Ok(total),
                    Err(error) => {
                        let _ = sender.send(Err(io::Error::other("the connection broke"))).await;
                        return Err(error);
                    }
                }
            }
        };
        (receiver, flowing)
    }

    async fn is_directory_there(&self, sandbox: &str, path: &str) -> Result<bool, Failure> {
        // The slash and dot follow a symlink, which `stat` alone does not.
        let inside = format!("{}/.", path.trim_end_matches('/'));
        match self.context.client.stat(self.place(sandbox, &inside)).await {
            Ok(entry) => Ok(entry.kind == EntryKind::Directory),
            // Not there, or not a directory; anything worse shows when it is written.
            Err(error) if matches!(error.code(), Some("path_not_found" | "bad_path")) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

fn directory_refused(path: &str) -> Failure {
    Failure::here(format!("`{path}` is a directory"))
        .with_hint("use `keep cp -r` to copy directories")
}

#[cfg(test)]
mod tests {
    use super::End;

    #[test]
    fn ends_as_people_write_them() {
        let there = |sandbox: &str, path: &str| End::There {
            sandbox: sandbox.to_owned(),
            path: path.to_owned(),
        };
        for (text, meant) in [
            ("my-app:/work/src", there("my-app", "/work/src")),
            ("my-app:src", there("my-app", "src")),
            ("my-app:", there("my-app", ".")),
            ("my-app:/a:b", there("my-app", "/a:b")),
            ("./my-app:/x", End::Here("./my-app:/x".into())),
            ("/tmp/a:b", End::Here("/tmp/a:b".into())),
            ("src", End::Here("src".into())),
            ("-", End::Stream),
        ] {
            assert_eq!(End::parse(text), meant, "{text}");
        }
    }
}
