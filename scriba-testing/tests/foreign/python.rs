//! A Python process that does what a test says with the published client.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use serde_json::{Value, json};

use super::install;

const DRIVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/foreign/driver.py");
/// Longer than the client waits for anything.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct Python {
    process: Child,
    input: ChildStdin,
    answers: Receiver<String>,
}

impl Python {
    pub(crate) fn connect(uri: &str) -> Self {
        let mut process = Command::new(install::python())
            .args([DRIVER, uri])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let (sender, answers) = sync_channel(1);
        std::thread::spawn(move || {
            // It ends when the process does, or the test.
            BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Self { process, input, answers }
    }

    /// What the client gave back, or the name of its error and the text.
    #[track_caller]
    pub(crate) fn ask(&mut self, command: &Value) -> Result<Value, (String, String)> {
        writeln!(self.input, "{command}").unwrap();
        let answer = self.answers.recv_timeout(PATIENCE);
        let line = answer.unwrap_or_else(|error| panic!("{command}: no answer: {error}"));
        let mut answer: Value = serde_json::from_str(&line).unwrap();
        let text = |value: &Value| value.as_str().map(str::to_owned);
        match text(&answer["error"]) {
            Some(error) => Err((error, text(&answer["message"]).unwrap())),
            None => Ok(answer["ok"].take()),
        }
    }

    /// Calls a method of the client.
    #[track_caller]
    pub(crate) fn call(&mut self, method: &str, arguments: Value) -> Result<Value, (String, String)> {
        self.ask(&with(json!({ "do": "call", "method": method }), arguments))
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ended = self.process.kill();
        let _reaped = self.process.wait();
    }
}

/// An object with the fields of another on top.
pub(crate) fn with(mut object: Value, more: Value) -> Value {
    let Value::Object(more) = more else { panic!("not an object: {more}") };
    object.as_object_mut().unwrap().extend(more);
    object
}
