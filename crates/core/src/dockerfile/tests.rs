use proptest::prelude::{ProptestConfig, proptest};

use super::{
    CopyFiles, IgnoreFile, IgnoreVerdict, InstructionKind, RunMount, ShellOrExec, expand, parse,
};

fn steps(text: &str) -> Vec<InstructionKind> {
    let file = parse(text).expect(text);
    file.stages.into_iter().flat_map(|stage| stage.steps).map(|step| step.kind).collect()
}

fn copies(text: &str) -> CopyFiles {
    match steps(text).remove(0) {
        InstructionKind::Copy(copy) => copy,
        other => panic!("{other:?}"),
    }
}

fn refused(text: &str) -> String {
    parse(text).expect_err(text).to_string()
}

#[test]
fn lines_are_joined_and_comments_left_out() {
    let text =
        "# a comment\n\nFROM a\nRUN one \\\n  # inside\n\n  && two \\ \n  && three\n  CMD x\n";
    let file = parse(text).expect("it is right");
    let lines: Vec<_> = file.stages[0].steps.iter().map(|step| (step.line, &*step.text)).collect();
    assert_eq!(lines, [(4, "RUN one && two && three"), (9, "CMD x")]);
}

#[test]
fn the_escape_character_can_be_another() {
    let text = "# syntax=x/y\n#escape=`\nFROM a\nRUN dir `\n  C:\\\nENV a=x`$y\n";
    let file = parse(text).expect("it is right");
    assert_eq!(file.escape, '`');
    assert_eq!(file.stages[0].steps[0].text, "RUN dir C:\\");
    assert_eq!(
        refused("# escape=x\nFROM a"),
        "line 1: the directive `escape` must be `\\` or a backtick"
    );
}

#[test]
fn stages_have_names_and_arguments_before_them() {
    let text = "ARG V=12\nFROM --platform=$P debian:$V AS Build\nFROM build\nFROM scratch\n";
    let file = parse(text).expect("it is right");
    assert_eq!(file.args, [(1, "V".to_owned(), Some("12".to_owned()))]);
    assert_eq!(file.stages[0].name.as_deref(), Some("build"));
    assert_eq!(file.stages[0].from.image, "debian:$V");
    assert_eq!(file.stages[0].from.platform.as_deref(), Some("$P"));
    assert_eq!(file.stages.len(), 3);
}

#[test]
fn heredocs_are_read_up_to_their_end() {
    let text = "FROM a\nRUN <<EOF cat >x <<-'END'\none\n  EOF\nEOF\n\ttwo\n\tEND\nCMD z";
    let [InstructionKind::Run { heredocs, .. }, InstructionKind::Cmd(_)] = &steps(text)[..] else {
        panic!("{:?}", steps(text));
    };
    let read: Vec<_> = heredocs.iter().map(|one| (&*one.name, one.expand, &*one.content)).collect();
    assert_eq!(read, [("EOF", true, "one\n  EOF\n"), ("END", false, "two\n")]);
    let copy = copies("FROM a\nCOPY <<a.txt b <<\"c.txt\" /to/\nA\na.txt\nC\nc.txt\n");
    assert_eq!((copy.sources, copy.to), (vec!["b".to_owned()], "/to/".to_owned()));
    assert_eq!(copy.heredocs.len(), 2);
    assert_eq!(refused("FROM a\n\nRUN <<EOF\nx"), "line 3: the heredoc `EOF` has no end");
    assert!(
        matches!(&steps("FROM a\nRUN cat <<<x")[0], InstructionKind::Run { heredocs, .. } if heredocs.is_empty())
    );
}

#[test]
fn commands_are_for_the_shell_or_lists() {
    let exec =
        |list: &[&str]| ShellOrExec::Exec(list.iter().map(|one| (*one).to_owned()).collect());
    assert_eq!(steps("FROM a\nCMD [\"a b\", \"c\"]")[0], InstructionKind::Cmd(exec(&["a b", "c"])));
    let shell = ShellOrExec::Shell("[ -e x ] && y".to_owned());
    assert_eq!(steps("FROM a\nENTRYPOINT [ -e x ] && y")[0], InstructionKind::Entrypoint(shell));
    assert!(refused("FROM a\nSHELL bash").starts_with("line 2: `SHELL` needs a list"));
}

#[test]
fn pairs_have_two_forms() {
    let own = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    };
    let text = "FROM a\nENV a=b c=\"d e\" f=g\\ h\nENV old some value\nLABEL x.y='z'";
    assert_eq!(
        steps(text),
        [
            InstructionKind::Env(own(&[("a", "b"), ("c", "\"d e\""), ("f", "g\\ h")])),
            InstructionKind::Env(own(&[("old", "some value")])),
            InstructionKind::Label(own(&[("x.y", "'z'")])),
        ]
    );
}

#[test]
fn mounts_are_read() {
    let text = "FROM a\nRUN --mount=type=cache,target=/c,uid=5,mode=0700 --mount=type=secret,id=s,required x";
    let InstructionKind::Run { mounts, .. } = &steps(text)[0] else { panic!() };
    let [RunMount::Cache(cache), RunMount::Secret(secret)] = &mounts[..] else { panic!() };
    assert_eq!((&*cache.id, cache.owner, cache.mode), ("/c", Some((5, 0)), Some(0o700)));
    assert_eq!((secret.target.as_deref(), secret.required), (Some("/run/secrets/s"), true));
    for (text, told) in [
        ("--mount=type=bind,target=/x", "`--mount=type=bind` is not supported"),
        ("--mount=target=/x", "`--mount=type=bind` is not supported"),
        ("--mount=type=cache", "a cache mount needs `target`"),
        ("--mount=type=secret,id=a,target=/etc/a", "the secret's target `/etc/a`"),
        ("--network=none", "`RUN --network` is not supported"),
    ] {
        let said = refused(&format!("FROM a\n\n\nRUN {text} x"));
        assert!(said.starts_with("line 4: ") && said.contains(told), "{said}");
    }
}

#[test]
fn what_is_wrong_or_not_supported_is_told_with_its_line() {
    for (text, told) in [
        ("", "line 1: there is no `FROM`"),
        ("RUN x", "line 1: `RUN` comes before the first `FROM`"),
        ("FROM a\nFOO x", "line 2: unknown instruction `FOO`"),
        ("FROM a\nVOLUME /data", "line 2: `VOLUME` is not supported"),
        ("FROM a\nHEALTHCHECK CMD x", "line 2: `HEALTHCHECK` is not supported"),
        ("FROM a\nONBUILD RUN x", "line 2: `ONBUILD` is not supported"),
        ("FROM a\nMAINTAINER me", "line 2: `MAINTAINER` is not supported; use `LABEL`"),
        ("FROM a\nCOPY x", "line 2: `COPY` needs a source and a target"),
        ("FROM a\nRUN", "line 2: `RUN` needs an argument"),
        ("FROM a b", "line 1: write `FROM IMAGE`"),
        ("FROM a AS x\nFROM b as X", "line 2: there is a stage `x` already, in line 1"),
        ("FROM a AS 1x", "line 1: `1x` cannot name a stage"),
        ("FROM a\nADD https://example.org/x /x", "line 2: `ADD` of an address"),
        ("FROM a\nCOPY --parents a b", "line 2: `COPY --parents` is not supported"),
        ("FROM a\nENV x", "line 2: `ENV x` has no value"),
        ("FROM a\nENV a=b c", "line 2: `ENV`: `c` is not NAME=VALUE"),
        ("FROM a\nARG 1=2", "line 2: `1` cannot name a build argument"),
        ("FROM a\nUSER a b", "line 2: `USER` needs exactly one argument"),
        ("FROM a\nCOPY --chown=a --chown=b x y", "line 2: `--chown` is given more than once"),
    ] {
        let said = refused(text);
        assert!(said.starts_with(told), "{text:?}: {said}");
    }
}

#[test]
fn words_are_expanded() {
    let lookup = |name: &str| match name {
        "a" => Some("A".to_owned()),
        "empty" => Some(String::new()),
        _ => None,
    };
    for (word, expanded) in [
        ("$a-${a}", Ok("A-A")),
        ("'$a' \"$a\" \\$a", Ok("$a A $a")),
        ("${no:-x$a}${no:+y}${a:+z}${a:-w}", Ok("xAzA")),
        ("${empty:-x}${empty-y}${empty:+z}${empty+w}", Ok("xw")),
        ("${no:-${a:+b}}$", Ok("b$")),
        ("\"a\\\"b\\n\"", Ok("a\"b\\n")),
        ("$no$1", Ok("$1")),
        ("${no:?gone}", Err("the variable `no` is not set: gone")),
        ("${a", Err("`${` has no `}`")),
        ("${a#x}", Err("`${a#…}` is not supported; there are `:-`, `:+` and `:?`")),
        ("${}", Err("`${` is not followed by the name of a variable")),
        ("'a", Err("a single quote is not closed")),
    ] {
        let found = expand(word, '\\', true, &lookup);
        assert_eq!(found.as_deref().map_err(|told| &**told), expanded, "{word}");
    }
    assert_eq!(expand("'$a' \\$a \\n", '\\', false, &lookup).as_deref(), Ok("'A' $a \\n"));
    let long = "x".repeat(100 << 10);
    assert!(expand("$a$a", '\\', true, &|_| Some(long.clone())).is_err());
}

#[test]
fn ignored_files_follow_dockers_rules() {
    let rules =
        "# no rule\n*.log\n!keep.log\n/target\n**/node_modules\ndocs/**/*.tmp\nsub\n!sub/in\n{a}\n";
    let rules = IgnoreFile::parse(rules).expect("they are right");
    let ignored = |path: &str| {
        let mut verdict = IgnoreVerdict::default();
        let mut at = String::new();
        for name in path.split('/') {
            at = if at.is_empty() { name.to_owned() } else { format!("{at}/{name}") };
            verdict = rules.judge(at.as_bytes(), &verdict);
        }
        verdict.ignored
    };
    for path in [
        "a.log",
        "target",
        "target/x/y",
        "x/node_modules/z",
        "node_modules",
        "docs/a/b.tmp",
        "docs/b.tmp",
        "sub",
        "sub/out",
        "{a}",
    ] {
        assert!(ignored(path), "{path}");
    }
    for path in ["x/a.log", "keep.log", "targets", "x/target", "sub/in", "sub/in/x", "a"] {
        assert!(!ignored(path), "{path}");
    }
    assert_eq!(IgnoreFile::parse("a\n[").map_err(|(line, _)| line).err(), Some(2));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn garbage_is_an_error_and_never_a_panic(text in ".{0,200}", words in "[\\\\\"'$\\{\\}:+?\\-a-z `\u{e9}]{0,60}") {
        let _ = parse(&text);
        let _ = expand(&words, '\\', true, &|_| Some("x".to_owned()));
        let _ = IgnoreFile::parse(&text);
    }

    #[test]
    fn instructions_made_of_fragments_never_panic(
        parts in proptest::collection::vec(
            proptest::sample::select(vec![
                "FROM ", "a", " AS ", "\n", "RUN ", "COPY ", "ADD ", "ENV ", "ARG ", "<<EOF", "EOF", "\\\n", "#", "escape=`",
                "--mount=", "type=cache", ",target=/x", "--from=", "[\"", "\"]", "=", "'", "\"", "$", "${", "}", " ", "\t", "é",
                "SHELL ", "WORKDIR ", "USER ", "EXPOSE ", "80/tcp", "LABEL ", "CMD ",
            ]),
            0..40,
        )
    ) {
        if let Ok(file) = parse(&parts.concat()) {
            assert!(!file.stages.is_empty());
        }
    }
}
