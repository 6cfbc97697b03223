//! What `keep` says and does when there is no server.

use std::process::{Command, Output};

fn keep(args: &[&str]) -> Output {
    let nowhere = tempfile::tempdir().unwrap();
    Command::new(env!("CARGO_BIN_EXE_keep"))
        .args(args)
        .env("SANDKEEP_DATA", nowhere.path())
        .env_remove("SANDKEEP_URL")
        .env_remove("SANDKEEP_KEY")
        .output()
        .unwrap()
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn commands_say_how_to_start_one() {
    for (args, code) in [
        (&["ls"][..], 3),
        (&["exec", "box", "--", "true"], 125),
        (&["run", "--rm", "--", "true"], 125),
        (&["--url", "http://127.0.0.1:1", "ls"], 3),
        (&["--url", "unix:///no/such/socket", "ls"], 3),
    ] {
        let output = keep(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", told(&output));
        assert!(
            told(&output).contains("hint: ") && told(&output).contains("keep serve"),
            "{args:?}"
        );
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn nonsense_is_refused_with_code_2() {
    for args in [&["frobnicate"][..], &["exec", "box"], &["create", "--expires", "soon"]] {
        assert_eq!(keep(args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn doctor_version_and_completions_need_none() {
    let output = keep(&["doctor", "--json"]);
    assert!(output.status.success(), "{}", told(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["findings"].as_array().unwrap().len() > 5);
    let output = keep(&["version", "--json"]);
    let versions: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(versions["client"], env!("CARGO_PKG_VERSION"));
    for shell in ["bash", "zsh", "fish"] {
        let output = keep(&["completions", shell]);
        assert!(output.stdout.len() > 1000, "{shell}");
    }
}

#[test]
fn serve_refuses_settings_it_does_not_know() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keep.toml");
    std::fs::write(&path, "lisen = '127.0.0.1:1'\n").unwrap();
    let output = keep(&["serve", "--config", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(told(&output).contains("lisen"), "{}", told(&output));
    assert!(told(&output).contains("hint: "), "{}", told(&output));
}
