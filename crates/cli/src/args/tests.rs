//! Which arguments are valid, what they mean, and that `docs/CLI.md` is up to date.

use std::path::Path;

use clap::FromArgMatches as _;

use super::{Command, GROUPS, Keep, command};

fn parse(line: &str) -> Result<Keep, String> {
    let words = std::iter::once("keep").chain(line.split_whitespace());
    let parsed = command().try_get_matches_from(words);
    parsed.and_then(|found| Keep::from_arg_matches(&found)).map_err(|error| error.to_string())
}

#[test]
fn the_definitions_hold_together() {
    command().debug_assert();
}

#[test]
fn help_lists_every_command_in_one_group() {
    let mut listed: Vec<&str> =
        GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
    listed.sort_unstable();
    let keep = command();
    let mut defined: Vec<&str> = keep.get_subcommands().map(clap::Command::get_name).collect();
    defined.sort_unstable();
    assert_eq!(listed, defined);
    for inner in keep.get_subcommands() {
        let about = inner.get_about().unwrap().to_string();
        assert!(about.len() <= 80, "too long for the list of commands: {about}");
    }
}

#[test]
fn valid_arguments() {
    for line in [
        "serve --data /d --listen 127.0.0.1:0",
        "create",
        "create my-app --tag customer=acme --tag agent=42 --purpose refactor --class workspace --expires 30d",
        "create a --get",
        "create a --if-exists get --no-start",
        "create a --image debian:12 --vcpus 0.5 --memory 512M --disk 1G --pids 100 -e A=b=c",
        "create a --timeout 1h --idle-timeout never --snapshot-expires 7d --keep-last all",
        "create a --on-create x --on-create y --on-resume z --validate v --validate-git /srv/repo --exclude tmp/**",
        "exec my-app -- npm install",
        "exec my-app npm install --verbose",
        "exec -it -u 1000:1000 -C /work -e X=1 --timeout 5s my-app -- sh",
        "exec --detach --if-running my-app -- sleep 1",
        "run --rm -- python3 -c print(1)",
        "run --rm --image x -it --memory 1G -- sh",
        "sh my-app",
        "stop a b c",
        "stop --all",
        "stop --all --all-projects --discard",
        "config",
        "config check",
        "config check my.toml --json",
        "man ./man1",
        "fork my-app try-a",
        "fork my-app --from snp-1 --start --tag attempt=b",
        "checkpoint my-app --label green",
        "webhook add https://hooks.example.org/x --events approval.asked --answers",
        "webhook set whk-1 --to https://hooks.example.org/x --answers false",
        "rollback my-app snp-1 --expect-generation 3",
        "ls --tag customer=acme --tag x=y --state running --class workspace",
        "list my- -q",
        "show my-app",
        "tree my-app",
        "ps my-app -n 5",
        "commands my-app",
        "logs my-app cmd-1 -f",
        "logs my-app",
        "kill my-app cmd-1 -s SIGINT",
        "cp -r ./src my-app:/work/src",
        "rm a b",
        "update a --untag x --tag y=z --extend 1h --persistent",
        "sessions a",
        "promote a --only *.whl --to drive:b:/c --expect-generation 3 --dry-run",
        "promote a --only *.whl --only x --out d",
        "create a --network deny-all",
        "create a --allow-domain *.example.com --allow-domain a.com:22,443 --allow-cidr 10.0.0.0/8 --deny-cidr 10.1.0.0/16",
        "fork a b --network-file policy.json",
        "update a --network default",
        "run --network deny-all -- true",
        "network a",
        "network a --add --allow-domain a.com",
        "network a --remove --allow-cidr 10.0.0.0/8 --json",
        "network a --default",
        "net a --denied --session ses-1 -f",
        "net a --summary --since 1h --host *.example.com",
        "project network main --default deny-all --bound-file -",
        "project network main --no-bound",
        "snapshot ls",
        "create a --mount data:/data --mount cache:/var/cache:snapshot",
        "update a --no-mounts",
        "create a --publish 3000 --publish 8080:private --no-wake-on-request",
        "update a --publish 3000:public --unpublish 8080 --wake-on-request",
        "ports a",
        "ports a 3000 private --no-wake",
        "open a 3000 --expires 1h",
        "open a 3000 --public",
        "forward a 5432 --local 15432 --address ::1",
        "service set a web --port 3000 --restart always -e A=b -- npm run dev",
        "service set a web npm run dev",
        "service ls a",
        "service logs a web -f",
        "drive create data --max-size 10G --get",
        "drive ls da",
        "drive get data",
        "drive fork data other",
        "drive rm data other",
        "snapshot export snp-1 -o x.tar",
        "image pull debian:12 -q",
        "image import mine root.tar",
        "image inspect mine",
        "image customize vercel/node24 --from node:24 -e A=b --path /opt/x/bin",
        "image dress x --add /a:/b --add rel:/c",
        "project create other",
        "key create ci --scope read --expires 30d --project other",
        "key create ops --scope write --approve",
        "runs start --sandbox my-app --fork --repo acme/api --purpose x --approve git* --keep 14d -- ./agent.sh -x",
        "runs start --fresh --image debian:12 --heartbeat 30s --priority -5",
        "runs ls --status waiting_for_approval --status failed -q",
        "runs approve run-1 --all -m fine",
        "runs review run-1 --again",
        "runs accept run-1 --how merge --rm",
        "approvals ls --all --sandbox a",
        "approvals ask a deploy? --default deny --expires 5m",
        "ask --context why --default approve deploy to prod?",
        "project governance main --running 3 --separate-approver true",
        "create a --hold git --hold npm --hold-expires 5m --hold-default approve",
        "create a --hold-hosts --known-host *.example.org --hold-secret API_KEY --hold-expires 5m",
        "runs start --sandbox a --approve-hosts --known-host github.com --approve-secret KEY -- true",
        "runs start --sandbox a --spending-limit cpu=10m+5m --spending-limit cost=5 -- true",
        "--project other ls",
        "key revoke key-1 key-2",
        "df --json",
        "doctor --strict",
        "fsck --rebuild --data /d",
        "completions zsh",
        "version",
    ] {
        assert!(parse(line).is_ok(), "{line}: {:?}", parse(line).err());
    }
}

/// Options of every command have names that no argument of a command has: it would be taken for them.
#[test]
fn the_address_of_a_webhook_is_not_that_of_the_server() {
    for line in [
        "webhook add https://hooks.example.org/x --events *",
        "webhook set whk-1 --to https://hooks.example.org/x",
        "--url http://127.0.0.1:1 webhook add https://hooks.example.org/x --events *",
    ] {
        let parsed = parse(line).unwrap();
        let given = parsed.global.url.unwrap_or_default();
        assert!(!given.contains("hooks.example.org"), "{line}: {given}");
    }
}

#[test]
fn invalid_arguments_are_explained() {
    for (line, told) in [
        ("", "Usage"),
        ("create a b", "unexpected argument 'b'"),
        ("create a --mount data", "DRIVE:/PATH"),
        ("create a --mount data:here", "DRIVE:/PATH"),
        ("create a --mount data:/x:rw", "not a mode"),
        ("update a --mount data:/x --no-mounts", "cannot be used with"),
        ("create a --network some", "allow-all, deny-all, custom, default"),
        ("create a --allow-domain 10.0.0.1", "an address, not a name"),
        ("create a --allow-domain a.com:0", "no port"),
        ("create a --allow-cidr example.com", "no address"),
        ("network a --add --remove --allow-domain a.com", "cannot be used with"),
        ("network a --default --network deny-all", "cannot be used with"),
        ("net a --follow --summary", "cannot be used with"),
        ("create a --expires 30", "like `90s` or `30d`"),
        ("create a --memory lots", "like `512M`"),
        ("create a --memory=-1", "like `512M`"),
        ("create a --vcpus 0", "like 2 or 0.5"),
        ("create a --tag customer", "write KEY=VALUE"),
        ("create a --env =x", "write NAME=VALUE"),
        ("create a --env NOT_SET_ANYWHERE_1", "is not set here"),
        ("create a --class forever", "ephemeral, resumable, workspace"),
        ("create a --get --if-exists fail", "cannot be used with"),
        ("create a --image x --from snp-1", "cannot be used with"),
        ("exec a", "required"),
        ("exec -d -t a -- x", "cannot be used with"),
        ("stop", "required"),
        ("kill a cmd-1 -s WHAT", "or one of HUP"),
        ("kill a cmd-1 -s 65", "1 to 64"),
        ("create a --keep-last some", "or `all`"),
        ("create a --idle-timeout x", "or `never`"),
        ("key create x --scope all", "read, write, admin"),
        ("runs start -- true", "--sandbox"),
        ("runs start --sandbox a --fresh -- true", "cannot be used with"),
        ("runs start --fork -- true", "--sandbox"),
        ("runs start --sandbox a --heartbeat 5s -- true", "cannot be used with"),
        ("runs ls --status done", "ready_for_review"),
        ("create a --hold-expires 5m", "--hold"),
        ("create a --known-host x", "--hold-hosts"),
        ("runs start --sandbox a --known-host x -- true", "--approve-hosts"),
        ("runs start --sandbox a --spending-limit cpu=much -- true", "--spending-limit"),
        ("runs start --sandbox a --spending-limit tea=1 -- true", "WHAT=LIMIT"),
        ("runs start --sandbox a --spending-limit cost=-1 -- true", "WHAT=LIMIT"),
        ("image customize x --add /a", "write DIR:PATH"),
        ("stop", "<NAME>"),
        ("stop a --all", "cannot be used with"),
        ("stop a --all-projects", "--all"),
        ("man", "<DIR>"),
        ("image customize x --add /a:b", "write DIR:PATH"),
        ("image customize x --env A", "write KEY=VALUE"),
    ] {
        let error = parse(line).expect_err(line);
        assert!(error.contains(told), "{line}: {error}");
    }
}

#[test]
fn what_follows_the_name_belongs_to_the_remote_command() {
    let Command::Exec(args) = parse("exec -t box -- ls --json -t").unwrap().command else {
        panic!("an exec");
    };
    assert_eq!(args.argv, ["ls", "--json", "-t"]);
    let keep = parse("exec box ls --json -i").unwrap();
    assert!(!keep.global.json);
    let Command::Exec(args) = keep.command else { panic!("an exec") };
    assert_eq!(args.argv, ["ls", "--json", "-i"]);
    assert!(!args.how.interactive);
}

/// The reference is a file in the repository, so that a change of it is seen in review. Run the tests
/// with `KEEP_REGENERATE=1` to write it anew.
#[test]
fn the_reference_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/CLI.md");
    let mut keep = command().term_width(96);
    keep.build();
    let mut text = String::from(
        "# The command line\n\nGenerated from `--help` of every command.\n`KEEP_REGENERATE=1 cargo test -p sandkeep --bins` updates it.\n",
    );
    describe(&keep, "keep", &mut text);
    if std::env::var_os("KEEP_REGENERATE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &text).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(written == text, "docs/CLI.md is out of date; run the tests with KEEP_REGENERATE=1");
}

fn describe(command: &clap::Command, path: &str, text: &mut String) {
    // Said once, for `keep` itself.
    let quiet = path != "keep";
    let shown = command.clone().term_width(96).mut_args(|arg| {
        let global = arg.is_global_set();
        arg.hide(quiet && global)
    });
    let help = shown.clone().render_long_help().to_string();
    let help: Vec<&str> = help.lines().map(str::trim_end).collect();
    text.push_str(&format!("\n## {path}\n\n```text\n{}\n```\n", help.join("\n").trim_end()));
    for inner in command.get_subcommands() {
        describe(inner, &format!("{path} {}", inner.get_name()), text);
    }
}
