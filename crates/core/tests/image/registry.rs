//! Pulls from registries on this machine, among them ones that break off, lie and ask who we are.

use std::fs;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use crate::image_support::registry::{Answer, Cutter, RealRegistry, Request, Script, USER, served};
use crate::image_support::{Archive, PLAIN, architecture, digest, drawn, gzip, zstd};
use sandkeep_core::model::Image;
use sandkeep_core::store::Store;
use sandkeep_core::store::image::{
    ImageError, ImageResult, ImageSettings, Images, Progress, Reporter,
};
use tempfile::TempDir;

struct Bench {
    images: Images,
    store: Store,
    _dir: TempDir,
}

impl Bench {
    fn new() -> Self {
        Self::with("", "")
    }

    /// With a docker configuration, and a credential helper `docker-credential-test`.
    fn with(config: &str, helper: &str) -> Self {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = TempDir::new().expect("a directory");
        let store = Store::open(&dir.path().join("data")).expect("a new store");
        let mut settings = ImageSettings::default();
        if !config.is_empty() {
            let path = dir.path().join("config.json");
            fs::write(&path, config).expect("ours");
            settings.docker_config = Some(path);
        }
        if !helper.is_empty() {
            let path = dir.path().join("docker-credential-test");
            fs::write(&path, helper).expect("ours");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("ours");
            let path = format!("{}:/usr/bin:/bin", dir.path().display());
            settings.helper_env = vec![("PATH".into(), path.into())];
        }
        Self { images: Images::new(store.clone(), settings), store, _dir: dir }
    }

    async fn pull(&self, reference: &str) -> ImageResult<Image> {
        self.images.pull(reference, &Reporter::silent()).await
    }

    fn drawn(&self, image: &Image) -> Vec<String> {
        image.layers.iter().map(|id| drawn(&self.store.diff_dir(id))).collect()
    }

    /// Names and lengths of downloads that are not complete.
    fn partial(&self) -> Vec<(String, u64)> {
        let Ok(entries) = fs::read_dir(self.store.data_dir().join("blobs/partial")) else {
            return Vec::new();
        };
        let each = entries.map(|entry| {
            let entry = entry.expect("ours");
            let length = entry.metadata().expect("ours").len();
            (entry.file_name().to_string_lossy().into_owned(), length)
        });
        each.collect()
    }
}

/// A layer that does not shrink when it is packed.
fn noise(name: &str, length: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64 ^ length as u64;
    let bytes: Vec<u8> = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    })
    .take(length)
    .collect();
    Archive::new().entry(tar::EntryType::Regular, name, "", &PLAIN, &bytes).end()
}

#[tokio::test]
async fn images_are_pulled_by_tag_and_by_digest_and_share_their_layers() {
    let test = "images_are_pulled_by_tag_and_by_digest_and_share_their_layers";
    let Some(registry) = RealRegistry::start(test, false).await else { return };
    let bottom = Archive::new().dir("etc", 0o755).file("etc/a", "a").end();
    let (one, two) = (Archive::new().file("one", "1").end(), Archive::new().file("two", "2").end());
    let layers = |top: &'_ [u8]| vec![gzip(&bottom), zstd(top)];
    let [one_packed, two_packed] = [layers(&one), layers(&two)];
    let first = [(&*bottom, one_packed[0].clone()), (&*one, one_packed[1].clone())];
    let second = [(&*bottom, two_packed[0].clone()), (&*two, two_packed[1].clone())];
    let sum = registry.push("team/app", "1", &first, architecture()).await;
    registry.push("team/app", "2", &second, architecture()).await;

    let bench = Bench::new();
    let repository = format!("{}/team/app", registry.address);
    let heard = Arc::new(Mutex::new(Vec::<Progress>::new()));
    let hearing = Arc::clone(&heard);
    let reporter = Reporter::new(move |progress| hearing.lock().expect("whole").push(progress));
    let by_tag = bench.images.pull(&format!("{repository}:1"), &reporter).await.expect("it pulls");
    assert_eq!((&*by_tag.name, &*by_tag.digest), (&*format!("{repository}:1"), &*sum));
    assert_eq!(bench.drawn(&by_tag), ["one: 644 1\n", "etc: dir 755\netc/a: 644 a\n"]);
    assert_eq!(by_tag.config.cwd.as_deref(), Some("/srv"));
    let heard = heard.lock().expect("whole").clone();
    assert!(heard.iter().any(|said| said.total == Some(said.done)), "{heard:?}");

    let by_digest = bench.pull(&format!("{repository}@{sum}")).await.expect("it pulls");
    assert_eq!(by_digest.layers, by_tag.layers);
    let other = bench.pull(&format!("{repository}:2")).await.expect("it pulls");
    assert_eq!(other.layers[1], by_tag.layers[1], "the bottom is shared");
    assert_ne!(other.layers[0], by_tag.layers[0]);
    assert_eq!(bench.partial(), [], "nothing is left of the downloads");
    assert_eq!(bench.images.list().await.expect("a list").len(), 3);
    assert!(bench.images.in_use().is_empty());
}

#[tokio::test]
async fn a_list_leads_to_the_image_for_this_machine() {
    const LIST: &str = "application/vnd.oci.image.index.v1+json";
    let test = "a_list_leads_to_the_image_for_this_machine";
    let Some(registry) = RealRegistry::start(test, false).await else { return };
    let (mine, theirs) =
        (Archive::new().file("mine", "x").end(), Archive::new().file("vax", "x").end());
    let entry = |sum: &str, architecture: &str| {
        serde_json::json!({
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": sum, "size": 1,
            "platform": {"os": "linux", "architecture": architecture},
        })
    };
    let vax = registry.push("app", "vax", &[(&*theirs, gzip(&theirs))], "vax").await;
    let here = registry.push("app", "here", &[(&*mine, gzip(&mine))], architecture()).await;
    let list = |entries: &[serde_json::Value]| serde_json::json!({"schemaVersion": 2, "mediaType": LIST, "manifests": entries});
    let both = list(&[entry(&vax, "vax"), entry(&here, architecture())]);
    let sum = registry.push_manifest("app", "both", LIST, &both).await;
    registry.push_manifest("app", "foreign", LIST, &list(&[entry(&vax, "vax")])).await;

    let bench = Bench::new();
    let image = bench.pull(&format!("{}/app:both", registry.address)).await.expect("it pulls");
    assert_eq!((&*image.digest, bench.drawn(&image)), (&*sum, vec!["mine: 644 x\n".to_owned()]));
    for tag in ["foreign", "vax"] {
        let refused = bench.pull(&format!("{}/app:{tag}", registry.address)).await;
        assert!(matches!(refused, Err(ImageError::Platform { .. })), "{tag}: {refused:?}");
    }
}

#[tokio::test]
async fn a_registry_that_asks_who_we_are_is_told() {
    let test = "a_registry_that_asks_who_we_are_is_told";
    let Some(registry) = RealRegistry::start(test, true).await else { return };
    let layer = Archive::new().file("a", "a").end();
    registry.push("app", "1", &[(&*layer, gzip(&layer))], architecture()).await;
    let reference = format!("{}/app:1", registry.address);
    let auth = base64(&format!("{}:{}", USER.0, USER.1));
    let with = |entry: &str| format!(r#"{{"auths": {{"http://{}": {entry}}}}}"#, registry.address);

    let denied = Bench::new().pull(&reference).await.expect_err("strangers may not");
    assert!(denied.to_string().contains("does not let strangers pull"), "{denied}");
    let wrong = Bench::with(&with(r#"{"username": "ann", "password": "wrong"}"#), "");
    let denied = wrong.pull(&reference).await.expect_err("a wrong password");
    assert!(denied.to_string().contains("does not let `ann` pull"), "{denied}");
    Bench::with(&with(&format!(r#"{{"auth": "{auth}"}}"#)), "")
        .pull(&reference)
        .await
        .expect("it pulls");

    let helper = format!(
        "#!/bin/sh\nread server\n[ \"$1 $server\" = 'get {}' ] && echo '{{\"ServerURL\":\"x\",\"Username\":\"{}\",\"Secret\":\"{}\"}}'\n",
        registry.address, USER.0, USER.1
    );
    for config in [
        format!(r#"{{"credHelpers": {{"{}": "test"}}}}"#, registry.address),
        r#"{"credsStore": "test"}"#.to_owned(),
    ] {
        Bench::with(&config, &helper).pull(&reference).await.expect("it pulls");
    }
    let knows_nothing = "#!/bin/sh\necho credentials not found in native keychain\nexit 1\n";
    let denied = Bench::with(r#"{"credsStore": "test"}"#, knows_nothing).pull(&reference).await;
    assert!(matches!(denied, Err(ImageError::Denied { .. })), "{denied:?}");
    let broken = "#!/bin/sh\necho the keychain is locked\nexit 1\n";
    let error = Bench::with(r#"{"credsStore": "test"}"#, broken).pull(&reference).await;
    let error = error.expect_err("the helper is broken").to_string();
    assert!(error.contains("the keychain is locked"), "{error}");
}

#[tokio::test]
async fn what_is_not_there_and_who_is_not_there_are_told_apart() {
    let test = "what_is_not_there_and_who_is_not_there_are_told_apart";
    let bench = Bench::new();
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr();
    let silent = silent.expect("it was bound");
    let nobody = bench.pull(&format!("{silent}/app:1")).await;
    assert!(matches!(nobody, Err(ImageError::Unreachable { .. })), "{nobody:?}");
    let bad = bench.pull("Not A Reference").await;
    assert!(matches!(bad, Err(ImageError::BadName { .. })), "{bad:?}");
    let Some(registry) = RealRegistry::start(test, false).await else { return };
    let layer = Archive::new().file("a", "a").end();
    registry.push("app", "1", &[(&*layer, gzip(&layer))], architecture()).await;
    let zeros = format!("app@sha256:{}", "0".repeat(64));
    for name in ["app:2", "other:1", &zeros] {
        let unknown = bench.pull(&format!("{}/{name}", registry.address)).await;
        assert!(matches!(unknown, Err(ImageError::Unknown { .. })), "{name}: {unknown:?}");
    }
}

#[tokio::test]
async fn a_connection_that_breaks_again_and_again_still_brings_the_image() {
    let test = "a_connection_that_breaks_again_and_again_still_brings_the_image";
    let Some(registry) = RealRegistry::start(test, false).await else { return };
    let layer = noise("big", 3 << 20);
    registry.push("app", "1", &[(&*layer, gzip(&layer))], architecture()).await;
    let cutter = Cutter::before(registry.address, 1 << 20, true).await;
    let bench = Bench::new();
    let image = bench.pull(&format!("{}/app:1", cutter.address)).await.expect("it pulls");
    assert_eq!(image.layers.len(), 1);
    let ranges = cutter.ranges.lock().expect("whole").clone();
    assert!(ranges.len() >= 3, "asked for the rest each time: {ranges:?}");
    let passed = cutter.passed.load(Ordering::SeqCst);
    assert!(passed < 4 << 20, "nothing was sent twice: {passed} bytes, {ranges:?}");
}

#[tokio::test]
async fn a_pull_that_failed_goes_on_where_it_broke_off() {
    let test = "a_pull_that_failed_goes_on_where_it_broke_off";
    let Some(registry) = RealRegistry::start(test, false).await else { return };
    let layer = noise("big", 3 << 20);
    let packed = gzip(&layer);
    registry.push("app", "1", &[(&*layer, packed.clone())], architecture()).await;
    let cutter = Cutter::before(registry.address, 2 << 20, false).await;
    let bench = Bench::new();
    let reference = format!("{}/app:1", cutter.address);
    let failed = bench.pull(&reference).await;
    assert!(matches!(failed, Err(ImageError::Unreachable { .. })), "{failed:?}");
    assert!(bench.images.list().await.expect("a list").is_empty(), "nothing half done");
    let kept = bench.partial();
    assert_eq!(kept.len(), 1);
    assert!(kept[0].1 > 1 << 20, "{kept:?}");

    cutter.budget.store(i64::MAX, Ordering::SeqCst);
    cutter.passed.store(0, Ordering::SeqCst);
    // As after a restart of the daemon: nothing is known but what is on disk.
    let again = Images::new(bench.store.clone(), ImageSettings::default());
    again.pull(&reference, &Reporter::silent()).await.expect("it pulls");
    let passed = cutter.passed.load(Ordering::SeqCst);
    assert!(passed < 2 << 20, "only the rest was sent: {passed} of {}", packed.len());
    assert_eq!(bench.partial(), []);
}

#[tokio::test]
async fn content_that_is_not_what_was_named_is_refused_and_thrown_away() {
    let test = "content_that_is_not_what_was_named_is_refused_and_thrown_away";
    let Some(registry) = RealRegistry::start(test, false).await else { return };
    let layer = noise("big", 100_000);
    let packed = gzip(&layer);
    registry.push("app", "1", &[(&*layer, packed.clone())], architecture()).await;
    registry.tamper(&digest(&packed));
    let bench = Bench::new();
    let refused = bench.pull(&format!("{}/app:1", registry.address)).await;
    assert!(matches!(refused, Err(ImageError::Digest { .. })), "{refused:?}");
    assert_eq!(bench.partial(), [], "the wrong bytes are not kept");
    assert!(bench.images.list().await.expect("a list").is_empty());
}

#[tokio::test]
async fn two_pulls_of_one_image_share_the_download() {
    let layer = noise("big", 300_000);
    let packed = gzip(&layer);
    let files = served(&layer, &packed);
    let asked = Arc::new(AtomicU32::new(0));
    let counting = Arc::clone(&asked);
    let blob = files[2].0.clone();
    let script = Script::start(move |_, request| {
        if request.path == blob {
            counting.fetch_add(1, Ordering::SeqCst);
        }
        lookup(&files, request)
    })
    .await;
    let bench = Bench::new();
    let reference = format!("{}/app:1", script.address);
    let (one, two) = tokio::join!(bench.pull(&reference), bench.pull(&reference));
    let (one, two) = (one.expect("it pulls"), two.expect("it pulls"));
    assert_eq!(one.layers, two.layers);
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

fn lookup(files: &[(String, Vec<u8>)], request: &Request) -> Answer {
    match files.iter().find(|(path, _)| *path == request.path) {
        Some((_, bytes)) => (200, Vec::new(), bytes.clone()),
        None => (404, Vec::new(), Vec::new()),
    }
}

/// A registry that trusts tokens of its own token service only, and only for three requests each.
async fn with_tokens(valid: fn(&Request) -> bool) -> Script {
    let layer = Archive::new().file("a", "a").end();
    let files = served(&layer, &gzip(&layer));
    let (issued, used) = (AtomicU32::new(0), AtomicI64::new(0));
    Script::start(move |address, request| {
        if request.path.starts_with("/token") {
            if !valid(request) {
                return (401, Vec::new(), Vec::new());
            }
            used.store(0, Ordering::SeqCst);
            let number = issued.fetch_add(1, Ordering::SeqCst) + 1;
            return (200, Vec::new(), format!(r#"{{"token": "t{number}"}}"#).into_bytes());
        }
        let current = format!("Bearer t{}", issued.load(Ordering::SeqCst));
        if request.authorization != current || used.fetch_add(1, Ordering::SeqCst) >= 2 {
            let challenge = format!(
                "Bearer realm=\"http://{address}/token\",service=\"reg\",scope=\"repository:app:pull\""
            );
            return (401, vec![("WWW-Authenticate", challenge)], Vec::new());
        }
        lookup(&files, request)
    })
    .await
}

#[tokio::test]
async fn tokens_are_got_renewed_and_never_given_to_the_wrong() {
    const ASKED: &str = "scope=repository%3Aapp%3Apull&service=reg";
    let anonymous = with_tokens(|r| r.authorization.is_empty() && r.path.contains(ASKED)).await;
    let image = Bench::new().pull(&format!("{}/app:1", anonymous.address)).await.expect("it pulls");
    assert_eq!(image.layers.len(), 1);

    let known = with_tokens(|r| r.authorization == format!("Basic {}", base64("ann:secret"))).await;
    let reference = format!("{}/app:1", known.address);
    let config = format!(
        r#"{{"auths": {{"{}": {{"username": "ann", "password": "secret"}}}}}}"#,
        known.address
    );
    Bench::with(&config, "").pull(&reference).await.expect("it pulls");
    let denied = Bench::new().pull(&reference).await;
    assert!(matches!(denied, Err(ImageError::Denied { .. })), "{denied:?}");

    let identity = with_tokens(|r| {
        r.method == "POST"
            && r.body.contains("grant_type=refresh_token")
            && r.body.contains("refresh_token=it%26me")
            && r.body.contains(ASKED)
    })
    .await;
    let config =
        format!(r#"{{"auths": {{"{}": {{"identitytoken": "it&me"}}}}}}"#, identity.address);
    Bench::with(&config, "").pull(&format!("{}/app:1", identity.address)).await.expect("it pulls");
}

#[tokio::test]
async fn registries_that_misbehave_are_answered_with_errors() {
    type Play = Box<dyn Fn(&Request) -> Answer + Send + Sync>;
    let layer = noise("a", 1000);
    let packed = gzip(&layer);
    let good = served(&layer, &packed);
    let changed = |path: usize, bytes: Vec<u8>| -> Play {
        let mut files = good.clone();
        files[path].1 = bytes;
        Box::new(move |request| lookup(&files, request))
    };
    let says = |status: u16, text: &'static str| -> Play {
        Box::new(move |_| (status, Vec::new(), text.as_bytes().to_vec()))
    };
    let longer = [packed.clone(), vec![0; 100]].concat();
    let artifact = r#"{"config": {"digest": "x"}, "layers": [{"digest": "y", "mediaType": "application/wasm"}]}"#;
    let cases: Vec<(&str, Play, &str)> = vec![
        ("no json", says(200, "<html>"), "cannot be read"),
        ("nothing", says(200, "{}"), "neither layers nor images"),
        ("an artifact", says(200, artifact), "of the kind `application/wasm`"),
        (
            "a stray digest",
            says(200, r#"{"config": {"digest": "../../x"}}"#),
            "its digest is `../../x`",
        ),
        (
            "a list of itself",
            says(200, r#"{"manifests": [{"digest": "1"}]}"#),
            "lead to each other",
        ),
        ("broken", says(500, "oh no"), "500"),
        ("too often", says(429, ""), "docker login"),
        ("forbidden", says(403, ""), "does not let strangers pull"),
        ("an endless document", Box::new(|_| (200, Vec::new(), vec![b' '; 17 << 20])), "16 MiB"),
        ("another config", changed(1, b"{}".to_vec()), "has the digest"),
        ("a longer blob", changed(2, longer), "longer than its manifest says"),
        ("a blob of zeros", changed(2, vec![0; packed.len()]), "has the digest"),
        (
            "a basic challenge of nobody",
            Box::new(|_| (401, vec![("WWW-Authenticate", "Basic realm=x".to_owned())], Vec::new())),
            "does not let strangers pull",
        ),
    ];
    for (case, play, message) in cases {
        let script = Script::start(move |_, request| play(request)).await;
        let bench = Bench::new();
        let error = bench.pull(&format!("{}/app:1", script.address)).await.expect_err(case);
        let said = error.to_string();
        assert!(said.contains(message), "{case}: {said}");
        assert!(bench.images.list().await.expect("a list").is_empty(), "{case}");
    }
}

#[tokio::test]
async fn a_registry_that_cannot_go_on_begins_again() {
    let layer = noise("a", 10_000);
    let packed = gzip(&layer);
    let files = served(&layer, &packed);
    let blob = files[2].0.clone();
    let asked = AtomicU32::new(0);
    // The first answer breaks off; the next ignore the range that is asked for.
    let script = Script::start(move |_, request| {
        let (status, headers, bytes) = lookup(&files, request);
        if request.path == blob && asked.fetch_add(1, Ordering::SeqCst) == 0 {
            let length = vec![("Content-Length", bytes.len().to_string())];
            return (200, length, bytes[..5000].to_vec());
        }
        (status, headers, bytes)
    })
    .await;
    let bench = Bench::new();
    bench.pull(&format!("{}/app:1", script.address)).await.expect("it pulls");
}

fn base64(text: &str) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(text)
}
