//! A socket through which a suite kills and starts its daemon: one command per line, answered with
//! `ok`.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use sandkeep_testkit::daemon::Daemon;

#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) path: PathBuf,
    listener: Option<JoinHandle<()>>,
}

impl Control {
    pub(crate) fn open(path: &Path, daemon: Arc<Mutex<Daemon>>) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        let listener = std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut word = String::new();
                BufReader::new(&stream).read_line(&mut word).unwrap();
                match word.trim() {
                    "kill" => daemon.lock().unwrap().kill(),
                    "launch" => daemon.lock().unwrap().launch(),
                    "end" => return,
                    other => {
                        let _ = writeln!(stream, "`{other}` is neither `kill` nor `launch`");
                        continue;
                    }
                }
                let _ = stream.write_all(b"ok\n");
            }
        });
        Self { path: path.to_path_buf(), listener: Some(listener) }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let told = UnixStream::connect(&self.path).and_then(|mut line| line.write_all(b"end\n"));
        if let (Ok(()), Some(listener)) = (told, self.listener.take()) {
            let _ = listener.join();
        }
    }
}
