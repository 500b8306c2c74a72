// Where the server's paths are, also under a route prefix, and whether this browser has signed in.
export const HERE = new URL(import.meta.url.replace(/\/dashboard\/.*$/, "/dashboard/"));
export const API = new URL("../v1/", HERE);

const SIGNED_IN = "alignedserve-signed-in";

/** The cookie is invisible to scripts, so a flag says whether there is something to sign out of. */
export function rememberSignIn(signedIn) {
  try {
    if (signedIn) window.localStorage.setItem(SIGNED_IN, "yes");
    else window.localStorage.removeItem(SIGNED_IN);
  } catch {
    // Storage is blocked: there is no button to sign out.
  }
}

export function hasSignedIn() {
  try {
    return window.localStorage.getItem(SIGNED_IN) === "yes";
  } catch {
    return false;
  }
}

/** JSON of one of the dashboard's paths. Raises an Error with `status` and the server's message. */
export async function getJson(path, signal) {
  const response = await fetch(new URL(path, HERE), { signal, cache: "no-store" });
  const body = await response.json().catch(() => null);
  if (response.status === 401) window.location.reload();  // the login form is there now
  if (!response.ok || body === null) {
    const error = new Error(body?.error?.message ?? `The server answered with status ${response.status}.`);
    error.status = response.status;
    throw error;
  }
  return body;
}
