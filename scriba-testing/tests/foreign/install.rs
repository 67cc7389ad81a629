//! Clients from the registries of other languages, installed once below the target directory.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

const PYTHON_PACKAGES: &str = include_str!("requirements.txt");
const NODE_PACKAGE: &str = "@kurrent/kurrentdb-client@1.3.1";

/// A Python that has `kurrentdbclient`.
pub(crate) fn python() -> PathBuf {
    let needs = "python3 with the module venv, and pip's packages. On Debian and Ubuntu: apt-get install python3-venv";
    once("python", PYTHON_PACKAGES, |home| {
        let requirements = home.join("requirements.txt");
        run(Command::new("python3").args(["-m", "venv"]).arg(home), needs);
        fs::write(&requirements, PYTHON_PACKAGES).unwrap();
        let pip = ["-m", "pip", "install", "--disable-pip-version-check", "--no-compile", "--quiet", "--requirement"];
        run(Command::new(home.join("bin/python")).args(pip).arg(requirements), needs);
    })
    .join("bin/python")
}

/// The directory that has `@kurrent/kurrentdb-client` among its modules.
pub(crate) fn node_modules() -> PathBuf {
    let needs = "node 18 or later and npm, with its packages. On Debian and Ubuntu: apt-get install nodejs npm";
    once("node", NODE_PACKAGE, |home| {
        fs::create_dir_all(home).unwrap();
        let npm = ["install", "--no-audit", "--no-fund", "--no-save", "--ignore-scripts", "--silent", "--prefix"];
        run(Command::new("npm").args(npm).arg(home).arg(NODE_PACKAGE), needs);
    })
    .join("node_modules")
}

/// Makes a directory with these contents, unless it is there. Test processes wait for each other.
fn once(name: &str, contents: &str, make: impl FnOnce(&Path)) -> PathBuf {
    let clients = Path::new(env!("CARGO_TARGET_TMPDIR")).join("foreign-clients");
    fs::create_dir_all(&clients).unwrap();
    let lock = File::create(clients.join(format!("{name}.lock"))).unwrap();
    lock.lock().unwrap();
    let (home, made) = (clients.join(name), clients.join(format!("{name}.made")));
    if !home.exists() || fs::read_to_string(&made).ok().as_deref() != Some(contents) {
        if home.exists() {
            fs::remove_dir_all(&home).unwrap();
        }
        make(&home);
        fs::write(&made, contents).unwrap();
    }
    home
}

#[track_caller]
fn run(command: &mut Command, needs: &str) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}. This test needs {needs}."));
    let said = || [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned()).concat();
    assert!(output.status.success(), "{command:?} failed. This test needs {needs}. It said:\n{}", said());
}
