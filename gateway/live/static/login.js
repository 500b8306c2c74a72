// The login form: it trades an API key for a cookie.
import { HERE, rememberSignIn } from "./paths.js";

const form = document.getElementById("login-form");
const key = document.getElementById("api-key");
const error = document.getElementById("login-error");
const send = document.getElementById("login-send");

async function signIn() {
  const response = await fetch(new URL("login", HERE), {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ api_key: key.value.trim() }),
  });
  if (response.ok) return "";
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `The server answered with status ${response.status}.`;
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  send.disabled = true;
  error.textContent = "";
  key.removeAttribute("aria-invalid");
  const problem = await signIn().catch(() => "The server cannot be reached.");
  send.disabled = false;
  if (problem) {
    error.textContent = problem;
    key.setAttribute("aria-invalid", "true");
    key.focus();
    return;
  }
  rememberSignIn(true);
  window.location.reload();
});

key.focus();
