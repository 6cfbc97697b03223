//! The description of `/v1` is kept in the repository, so that a change to it is seen in review.

use std::path::Path;

#[test]
fn the_description_is_the_one_on_record() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../openapi/v1.json");
    let now = sandkeep_server::openapi::json();
    if std::env::var_os("UPDATE_OPENAPI").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &now).unwrap();
    }
    let on_record = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = now.lines().zip(on_record.lines()).position(|(now, before)| now != before);
    assert!(
        now == on_record,
        "openapi/v1.json is not what the routes say (first at line {}); if the change is meant, run\n\
         UPDATE_OPENAPI=1 cargo test -p sandkeep-server --test openapi",
        differs.map_or(now.lines().count().min(on_record.lines().count()), |at| at) + 1,
    );
}
