{{/* What no schema can say: combinations that cannot work end here, with a sentence. */}}
{{- define "pd-coordinator.checks" -}}
{{- $server := .Values.config.server -}}
{{- range $key := list "host" "management_host" -}}
{{- if regexMatch "^(127[.]|localhost$|::1$|$)" (get $server $key | default "") -}}
{{- fail (printf "config.server.%s must be 0.0.0.0 or '::': nobody outside the pod reaches %q" $key (get $server $key | default "127.0.0.1")) -}}
{{- end -}}
{{- end -}}
{{- if include "pd-coordinator.exclusive" . -}}
{{- $why := ternary "an engine of enginePorts calls back one coordinator" "a decode instance of MindIE has one coordinator" (gt (len .Values.enginePorts) 0) -}}
{{- if .Values.autoscaling.enabled -}}
{{- fail (printf "autoscaling.enabled: %s, so there can be one pod only" $why) -}}
{{- else if gt (.Values.replicaCount | int64) 1 -}}
{{- fail (printf "replicaCount must be 1: %s; give each coordinator a release and instances of its own" $why) -}}
{{- end -}}
{{- end -}}
{{- if gt (.Values.autoscaling.minReplicas | int64) (.Values.autoscaling.maxReplicas | int64) -}}
{{- fail "autoscaling.minReplicas is greater than autoscaling.maxReplicas" -}}
{{- end -}}
{{- if (get (.Values.config.tls | default dict) "management" | default dict).client_ca_file -}}
{{- fail "config.tls.management.client_ca_file: the kubelet has no certificate for its probes; use management keys and networkPolicy.managementFrom" -}}
{{- end -}}
{{- if and (eq .Values.probes.port "status") (not $server.status_port) -}}
{{- fail "probes.port is status, but config.server.status_port is not set" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled .Values.networkPolicy.dataFrom (ne .Values.service.type "ClusterIP") -}}
{{- $outside := false -}}
{{- range .Values.networkPolicy.dataFrom -}}
{{- $outside = or $outside (hasKey . "ipBlock") -}}
{{- end -}}
{{- if not $outside -}}
{{- fail (printf "service.type is %s, but networkPolicy.dataFrom lets nobody in from outside the cluster: add an ipBlock" .Values.service.type) -}}
{{- end -}}
{{- end -}}
{{- $names := list -}}
{{- range .Values.secretFiles -}}
{{- if has .name $names -}}
{{- fail (printf "secretFiles: the name %q stands twice" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- $variables := list -}}
{{- range concat .Values.secretEnv .Values.extraEnv -}}
{{- if has .name $variables -}}
{{- fail (printf "secretEnv, extraEnv: the variable %q stands twice" .name) -}}
{{- end -}}
{{- $variables = append $variables .name -}}
{{- end -}}
{{- $used := dict "tracing.headers_env" (.Values.config.tracing | default dict).headers_env -}}
{{- $_ := set $used "auth.engine_key_env" (.Values.config.auth | default dict).engine_key_env -}}
{{- range $at, $instance := (.Values.config.cluster | default dict).instances -}}
{{- $_ := set $used (printf "cluster.instances[%d].engine_key_env" $at) $instance.engine_key_env -}}
{{- end -}}
{{- range $path, $name := $used -}}
{{- if and $name (not (has $name $variables)) -}}
{{- fail (printf "config.%s is %q, but neither secretEnv nor extraEnv has this variable" $path $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
